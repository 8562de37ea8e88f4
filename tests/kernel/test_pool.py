"""The team of threads that runs the compiled kernels."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from kernels.linear import PackedLinear

NAME = "pagemill-kernel-"
DEADLINE_S = 10

FORK = """
import os, torch
from kernels.linear import PackedLinear
torch.set_num_threads(2)
layer, x = PackedLinear(torch.randn(960, 576)), torch.randn(2, 576)
wanted = layer(x)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(layer(x), wanted) else 1)
assert os.waitpid(child, 0)[1] == 0
assert torch.equal(layer(x), wanted)
"""


@pytest.mark.parametrize("num_threads", [2, 3, 9])
def test_thousands_of_regions_give_the_same_bits_on_any_number_of_threads(
    num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = PackedLinear(torch.randn(960, 576)), torch.randn(3, 576)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    wanted = layer(x)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    for region in range(3000):
        assert torch.equal(layer(x), wanted), f"region {region}"


def test_python_threads_may_lead_regions_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = PackedLinear(torch.randn(960, 576)), torch.randn(2, 576)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    wanted = layer(x)
    results: list[bool] = []

    def lead() -> None:
        results.extend(torch.equal(layer(x), wanted) for _ in range(200))

    leaders = [threading.Thread(target=lead) for _ in range(3)]
    for leader in leaders:
        leader.start()
    for leader in leaders:
        leader.join()
    assert results == [True] * 600


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads the states of threads from /proc")
def test_helpers_sleep_while_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    layer, x = PackedLinear(torch.randn(960, 576)), torch.randn(2, 576)
    layer(x)
    helpers = [thread.native_id for thread in threading.enumerate() if thread.name.startswith(NAME)]
    assert len(helpers) >= 2
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        lines = [Path(f"/proc/self/task/{thread_id}/stat").read_text() for thread_id in helpers]
        if all(line.rsplit(")", 1)[1].split()[0] == "S" for line in lines):
            break
        time.sleep(0.01)
    else:
        pytest.fail(f"helpers are still awake after {DEADLINE_S} s")
    assert torch.equal(layer(x), layer(x)), "and they wake up again"


def test_a_process_ends_in_order_right_after_a_region() -> None:
    code = (
        "import torch; from kernels.linear import PackedLinear; torch.set_num_threads(4);"
        "layer = PackedLinear(torch.randn(960, 576)); x = torch.randn(2, 576); [layer(x) for _ in range(50)]"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
def test_a_forked_child_has_a_team_of_its_own() -> None:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
