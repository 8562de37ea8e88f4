"""Both engine modes behave alike: the same tests run on the process and on the thread."""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from scheduler.output import FinishReason, SequenceOutput
from scheduler.sampling_params import SamplingParams
from tests.tiny_checkpoint import write_tiny_checkpoint
from worker.engine import EngineRequest
from worker.engine_client import EngineClient, EngineDiedError, InProcessEngine, ProcessEngine
from worker.engine_config import EngineConfig
from worker.errors import StartupError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    return EngineConfig(str(folder), num_kv_blocks=32, max_num_seqs=8, num_threads=1, check_invariants="step")


@pytest.fixture(params=[ProcessEngine, InProcessEngine], ids=["process", "inprocess"])
async def engine(request: pytest.FixtureRequest, config: EngineConfig) -> AsyncIterator[EngineClient]:
    client: EngineClient = request.param(config)
    await client.start()
    yield client
    await client.close()


async def collect(engine: EngineClient, wanted: set[str]) -> dict[str, list[SequenceOutput]]:
    """The outputs of each sequence until all `wanted` have ended."""
    seen: dict[str, list[SequenceOutput]] = {}
    async with asyncio.timeout(60):
        while wanted:
            for output in (await engine.next_report()).outputs:
                seen.setdefault(output.seq_id, []).append(output)
                if output.finish_reason is not None:
                    wanted = wanted - {output.seq_id}
    return seen


def ids_of(outputs: list[SequenceOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.new_token_ids]


async def test_sequences_are_generated_to_their_length(engine: EngineClient) -> None:
    for name in ("a", "b"):
        engine.add(EngineRequest(name, (1, 2, 3), GREEDY, seed=0))
    seen = await collect(engine, {"a", "b"})
    assert len(ids_of(seen["a"])) == 12
    assert ids_of(seen["a"]) == ids_of(seen["b"])
    last = seen["a"][-1]
    assert last.finish_reason is FinishReason.LENGTH
    assert last.stats is not None
    assert last.stats.num_generated_tokens == 12


async def test_generated_ids_are_gone_on_from(engine: EngineClient) -> None:
    engine.add(EngineRequest("whole", (5, 6, 7), GREEDY, seed=0))
    whole = ids_of((await collect(engine, {"whole"}))["whole"])
    engine.add(EngineRequest("rest", (5, 6, 7), GREEDY, seed=0, generated_ids=tuple(whole[:5])))
    assert ids_of((await collect(engine, {"rest"}))["rest"]) == whole[5:]


async def test_a_prompt_that_never_fits_is_refused_alone(engine: EngineClient) -> None:
    engine.add(EngineRequest("long", tuple(range(100)) * 6, GREEDY, seed=0))
    engine.add(EngineRequest("fine", (1, 2), GREEDY, seed=0))
    seen = await collect(engine, {"long", "fine"})
    assert seen["long"][-1].finish_reason is FinishReason.ERROR
    assert "600" in (seen["long"][-1].error or "")
    assert seen["fine"][-1].finish_reason is FinishReason.LENGTH


async def test_an_aborted_sequence_brings_nothing_more_and_frees_its_blocks(engine: EngineClient) -> None:
    engine.add(EngineRequest("gone", (1, 2), SamplingParams(temperature=0, max_tokens=400, ignore_eos=True), seed=0))
    await engine.next_report()
    engine.abort("gone")
    engine.abort("never heard of")
    engine.add(EngineRequest("next", (3, 4), GREEDY, seed=0))
    seen = await collect(engine, {"next"})
    assert len(seen.get("gone", [])) < 400
    async with asyncio.timeout(30):
        engine.abort("wake up")
        stats = (await engine.next_report()).stats
    assert stats.num_free_blocks + stats.num_cached_blocks == 32


async def test_a_missing_checkpoint_is_one_clear_line(tmp_path: Path) -> None:
    for kind in (ProcessEngine, InProcessEngine):
        client: EngineClient = kind(EngineConfig(str(tmp_path / "nowhere")))
        with pytest.raises(StartupError, match="nowhere") as caught:
            await client.start()
        assert "\n" not in str(caught.value)
        await client.close()


def test_a_wrong_choice_of_kernels_is_one_clear_line(config: EngineConfig) -> None:
    code = (
        "import asyncio, json, sys\n"
        "from worker import engine_client\n"
        "from worker.engine_config import EngineConfig\n"
        "client = getattr(engine_client, sys.argv[1])(EngineConfig(**json.loads(sys.argv[2])))\n"
        "asyncio.run(client.start())\n"
    )
    for kind in (ProcessEngine, InProcessEngine):
        ran = subprocess.run(
            [sys.executable, "-c", code, kind.__name__, json.dumps(dataclasses.asdict(config))],
            env=os.environ | {"PAGEMILL_KERNELS": "nonsense"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        last = ran.stderr.splitlines()[-1]
        assert last.startswith("worker.errors.StartupError: the engine can't be loaded: PAGEMILL_KERNELS is 'nonsense'")
        assert ran.stderr.count("Traceback") == 1, "its caller's own"


async def test_a_killed_engine_process_is_told(config: EngineConfig) -> None:
    client = ProcessEngine(config)
    await client.start()
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(EngineDiedError, match="signal 9"):
        await asyncio.wait_for(client.next_report(), 20)
    await client.close()


def test_an_idle_engine_process_ends_with_its_parent(config: EngineConfig) -> None:
    """The parent is killed with SIGKILL, so nothing of it can clean up."""
    code = (
        "import asyncio, sys, json\n"
        "from worker.engine_client import ProcessEngine\n"
        "from worker.engine_config import EngineConfig\n"
        "async def main():\n"
        "    client = ProcessEngine(EngineConfig(**json.loads(sys.argv[1])))\n"
        "    await client.start()\n"
        "    print(client.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    arguments = [sys.executable, "-c", code, json.dumps(dataclasses.asdict(config))]
    parent = subprocess.Popen(arguments, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and is_running(pid):
        time.sleep(0.02)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


async def test_a_thread_that_is_to_be_ended_is_told_of_as_dead_and_goes_on(config: EngineConfig) -> None:
    engine = InProcessEngine(config)
    assert not engine.kill()
    with pytest.raises(EngineDiedError, match="hangs"):
        await engine.next_report()
    await engine.close()
