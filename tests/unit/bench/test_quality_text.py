"""The fixed text: another one, or other tokens of it, would make other figures of the same model."""

import hashlib
import json
from pathlib import Path

from model.tokenizer import Tokenizer
from ops.bench.quality_text import TEXT


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_the_text_is_the_one_that_all_figures_are_of() -> None:
    """Whoever changes it measures every figure of docs/kernels.md and docs/performance.md again."""
    assert sha256(TEXT) == "128f3249a823c3f6f3062ea186295280bf15216605e83b07a90eba38d8a8c626"


def test_the_demo_model_reads_the_tokens_that_its_figures_are_of(demo_model_path: Path) -> None:
    """The digest that a report carries as `ids_sha256`."""
    ids = Tokenizer.from_checkpoint(demo_model_path).encode(TEXT)[:2000]
    assert len(ids) == 2000
    assert sha256(json.dumps(ids)) == "75819458619694c06576e86a528ca125fd9dd14e88dfd0bd4635df16e78c3e7f"
