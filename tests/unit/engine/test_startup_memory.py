"""A start that runs out of memory, however a library says so, ends with one line."""

import errno
import resource
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from model.errors import CorruptCheckpointError, TooLittleMemoryError
from model.gguf import GGUFFile
from model.safetensors_files import open_safetensors
from tests.tiny_checkpoint import write_tiny_checkpoint
from worker.engine_builder import build_engine
from worker.engine_client import EngineDiedError, ProcessEngine
from worker.engine_config import EngineConfig
from worker.engine_supervisor import EngineSupervisor
from worker.errors import StartupError

MIB = 1 << 20
SHORT_OF_MEMORY = [
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 5636096 bytes. Error code 12 (Cannot allocate memory)"
    ),
    RuntimeError("unable to mmap 5636096 bytes from file </x.safetensors>: Cannot allocate memory (12)"),
    ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    RuntimeError("std::bad_alloc"),
]


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return EngineConfig(str(write_tiny_checkpoint(tmp_path)), num_kv_blocks=16, max_num_seqs=2, num_threads=1)


def failing_with(error: BaseException) -> Callable[..., None]:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("error", SHORT_OF_MEMORY, ids=lambda error: f"{type(error).__name__} {error}"[:40])
@pytest.mark.parametrize("place", ["read_model", "load_checkpoint", "Decoder", "KVCache", "ModelRunner.warm_up"])
def test_too_little_memory_at_any_point_of_the_start_is_one_line(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, place: str, error: BaseException
) -> None:
    monkeypatch.setattr(f"worker.engine_builder.{place}", failing_with(error))
    with pytest.raises(StartupError) as caught:
        build_engine(config)
    message = str(caught.value)
    assert "\n" not in message
    assert "doesn't fit into memory" in message
    assert "are left of" in message
    assert "lower num_kv_blocks" in message
    assert ("and 5 MiB could not be had" in message) == ("5636096" in str(error))


@pytest.mark.parametrize(
    "error", [RuntimeError("can't start new thread"), OSError(errno.EAGAIN, "Resource temporarily unavailable")]
)
def test_too_few_threads_are_told_too(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr("worker.engine_builder.KVCache", failing_with(error))
    with pytest.raises(StartupError, match=r"a thread could not be started: raise the limit .*ulimit -u.*num_threads"):
        build_engine(config)


def test_an_error_of_another_kind_is_not_taken_for_it(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.engine_builder.KVCache", failing_with(RuntimeError("sizes don't match")))
    with pytest.raises(RuntimeError, match="sizes don't match"):
        build_engine(config)


@pytest.mark.parametrize("error", [SHORT_OF_MEMORY[1], SHORT_OF_MEMORY[3]], ids=["system", "torch"])
def test_a_file_that_can_not_be_mapped_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Who takes a cached conversion for damaged deletes it."""
    path = write_tiny_checkpoint(tmp_path) / "model.safetensors"
    with monkeypatch.context() as patched:
        patched.setattr("model.safetensors_files.safe_open", failing_with(error))
        with pytest.raises(
            TooLittleMemoryError, match=r"model\.safetensors \(0 MiB\) can't be mapped, for lack of memory"
        ):
            open_safetensors(path, "pt")
        patched.setattr("mmap.mmap", failing_with(error))
        with pytest.raises((TooLittleMemoryError, RuntimeError)):
            GGUFFile(path)
    path.write_bytes(b"x" * 100)
    with pytest.raises(CorruptCheckpointError):
        open_safetensors(path, "pt")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit of the address space is Linux's")
@pytest.mark.parametrize("limit_mib", [200, 500, 900])
async def test_an_engine_process_under_a_tight_limit_ends_with_one_line(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, limit_mib: int
) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit_mib * MIB, limit_mib * MIB))

    monkeypatch.setattr("worker.engine_client.subprocess.Popen", partial(subprocess.Popen, preexec_fn=limit))
    client = ProcessEngine(config)
    with pytest.raises(StartupError, match=r"too little memory|doesn't fit into memory") as caught:
        await client.start()
    await client.close()
    assert "\n" not in str(caught.value)


async def test_an_engine_that_is_ended_without_a_word_is_told_with_what_memory_there_is(config: EngineConfig) -> None:
    class Killed:
        """An engine process that the system ends."""

        async def start(self) -> None:
            raise EngineDiedError("the engine process was ended by signal 9")

        async def close(self) -> None:
            pass

    supervisor = EngineSupervisor(
        lambda told: Killed(),  # type: ignore[arg-type,return-value]  # all that a start calls
        on_report=lambda report: None,
        on_death=lambda error: None,
        on_restart=lambda: None,
        watchdog_s=60,
    )
    with pytest.raises(StartupError, match=r"ended by signal 9, perhaps for lack of memory \(.* are left of .*\)"):
        await supervisor.start()
