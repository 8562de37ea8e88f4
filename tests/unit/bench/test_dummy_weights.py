"""The bench without a checkpoint: both sides on the same random weights."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_checkpoint import CONFIG


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_both_sides_of_a_bench_without_a_checkpoint_draw_the_same_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    words = ["--quick", "--load-format", "dummy", "--model", str(tmp_path), "--batches", "2", "--num-threads", "1"]
    code = "import sys; from ops.bench.cli import main; sys.exit(main(sys.argv[1:]))"
    ran = subprocess.run(
        [sys.executable, "-c", code, *words, "--peers", "transformers"],
        capture_output=True,
        check=True,
        text=True,
        timeout=580,
    )
    report = json.loads(ran.stdout.splitlines()[-1])
    assert report["is_token_check_passed"]
    assert report["engine"]["fingerprint"].startswith("dummy-")
    assert report["batches"]
