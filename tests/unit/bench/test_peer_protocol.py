"""Peers in a Python that has none of our dependencies, but a double of the peer's package."""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from ops.bench.errors import BenchError
from ops.bench.peers.gguf_files import converted
from ops.bench.runs import PeerRun
from ops.bench.side import SideProcess

VLLM = """
import asyncio, types, sys
__version__ = "9.9"
built, in_flight, most = [], [], []

class SamplingParams:
    def __init__(self, **values):
        self.values = values

class AsyncEngineArgs:
    def __init__(self, **values):
        self.values = values

class AsyncLLM:
    @classmethod
    def from_engine_args(cls, args):
        built.append(args.values)
        return cls()

    async def generate(self, prompt, params, request_id):
        ids = prompt["prompt_token_ids"]
        in_flight.append(request_id)
        most.append(len(in_flight))
        for n in range(params.values["max_tokens"]):
            await asyncio.sleep(0)
            completion = types.SimpleNamespace(token_ids=[ids[0] + n])
            yield types.SimpleNamespace(outputs=[completion])
        in_flight.remove(request_id)

    def shutdown(self):
        print([each["max_num_seqs"] for each in built], max(most), file=sys.stderr, flush=True)

def module(name, **values):
    made = types.ModuleType(name)
    made.__dict__.update(values)
    sys.modules[name] = made

module("vllm.sampling_params", RequestOutputKind=types.SimpleNamespace(DELTA=1))
module("vllm.engine.arg_utils", AsyncEngineArgs=AsyncEngineArgs)
module("vllm.engine", arg_utils=None)
module("vllm.v1", engine=None)
module("vllm.v1.engine", async_llm=None)
module("vllm.v1.engine.async_llm", AsyncLLM=AsyncLLM)
"""
XLLAMACPP = """
import types
__version__ = "9.9"

class CommonParams:
    def __init__(self):
        self.model = types.SimpleNamespace()
        self.cpuparams = types.SimpleNamespace()
        self.cpuparams_batch = types.SimpleNamespace()

class Server:
    def __init__(self, params):
        assert params.n_ctx % (256 * params.n_parallel) == 0, params.n_ctx
        assert params.model.path.endswith("F32.gguf"), params.model.path

    def handle_completions(self, wanted, take):
        if wanted["prompt"][0] == 13:
            return take({"error": "no such luck"})
        for n in range(wanted["n_predict"] - 1):  # the last token ends in the middle of a letter
            take({"choices": [{"finish_reason": None}]})
        take({"choices": [{"finish_reason": "length"}], "usage": {"completion_tokens": wanted["n_predict"]}})
"""
REQUESTS = [([40, 1, 2], 3), ([50], 1), ([60, 7], 2)]


@pytest.fixture
def python(tmp_path: Path) -> str:
    """A Python whose only packages are the doubles."""
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "vllm.py").write_text(VLLM)
    (packages / "xllamacpp.py").write_text(XLLAMACPP)
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexport PYTHONPATH="$PYTHONPATH:{packages}"\nexec {sys.executable} -S "$@"\n')
    script.chmod(0o755)
    return str(script)


def test_vllm_s_side_needs_nothing_of_ours_but_our_packages(python: str, capfd: pytest.CaptureFixture[str]) -> None:
    options = {"model_path": "folder", "dtype": "float32", "device": "cpu", "num_threads": 2, "max_batch": 50}
    with SideProcess("vllm's side", "ops.bench.peers.vllm_engine", options, python=python) as side:
        assert side.ask("prepare", batch=2, num_kv_tokens=300) == {
            "version": "9.9",
            "dtype": "float32",
            "threads": "0-1",
        }
        run = PeerRun(**side.ask("run", requests=REQUESTS, batch=2))
        assert (run.num_output_tokens, run.num_steps, run.first_ids) == (6, None, [40, 41, 42])
        assert (len(run.ttft_s), len(run.gap_s), len(run.reply_s)) == (3, 3, 3)
        late = PeerRun(**side.ask("run_arrivals", requests=REQUESTS, arrivals_s=[0.0, 0.0, 0.2]))
        assert late.wall_s >= 0.2
        assert late.reply_s[2] <= late.wall_s - 0.2 + 1e-9
    # One engine, for the largest batch, and no more requests in it than this batch has.
    assert capfd.readouterr().err.splitlines() == ["[50] 2"]


def test_llama_cpp_s_side_counts_tokens_whose_text_comes_late_and_tells_an_error_in_a_line(
    python: str, tmp_path: Path
) -> None:
    source = write_gguf(tmp_path / "tiny.gguf")
    converted(source, "F32", tmp_path)
    options = {"model_path": str(source), "cache_dir": str(tmp_path), "weights": "F32", "num_threads": 1}
    with SideProcess("llamacpp's side", "ops.bench.peers.llamacpp", options, python=python) as side:
        assert side.ask("prepare", batch=2, num_kv_tokens=300)["weights"] == "F32"
        run = PeerRun(**side.ask("run", requests=REQUESTS, batch=2))
        assert (run.num_output_tokens, run.first_ids, len(run.gap_s)) == (6, [], 3)
        with pytest.raises(BenchError, match=r"llamacpp's side: llama.cpp answered \{\"error\": \"no such luck\"\}"):
            side.ask("run", requests=[([13], 1)], batch=2)


def test_an_interpreter_that_can_not_run_is_told_by_name() -> None:
    with pytest.raises(BenchError, match=r"^can't start vllm's side with /nowhere/python: No such file or directory$"):
        SideProcess("vllm's side", "ops.bench.peers.vllm_engine", {}, python="/nowhere/python")


def write_gguf(path: Path) -> Path:
    """A file of a quantized matrix and a vector, with metadata of several kinds."""
    generator = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "ß", "c"])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0, 2.0])
    matrix = generator.normal(size=(4, 64)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q4_1
    writer.add_tensor("blk.0.attn_q.weight", gguf.quantize(matrix, kind), raw_dtype=kind)
    writer.add_tensor("blk.0.attn_norm.weight", generator.normal(size=64).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("kind", "error"), [("F32", 0.0), ("F16", 1e-3), ("Q8_0", 1e-2)])
def test_a_gguf_file_of_another_type_has_the_same_numbers_and_metadata(tmp_path: Path, kind: str, error: float) -> None:
    source = write_gguf(tmp_path / "tiny.gguf")
    target = converted(source, kind, tmp_path)
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(target)
    assert [tensor.tensor_type.name for tensor in after.tensors] == [kind, "F32"]
    for mine, theirs in zip(before.tensors, after.tensors, strict=True):
        assert (mine.name, list(mine.shape)) == (theirs.name, list(theirs.shape))
        wanted, found = (gguf.dequantize(each.data, each.tensor_type) for each in (mine, theirs))
        assert np.abs(wanted - found).max() <= error * np.abs(wanted).max()
    for name in ("llama.block_count", "tokenizer.ggml.tokens", "tokenizer.ggml.scores"):
        assert after.fields[name].contents() == before.fields[name].contents()
    stamp = target.stat().st_mtime_ns
    assert converted(source, kind, tmp_path) == target
    assert target.stat().st_mtime_ns == stamp
    assert [path.suffix for path in target.parent.iterdir()] == [".gguf"]


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(BenchError, match=r"llama.cpp reads GGUF files, and .* is none: name one with --model"):
        converted(tmp_path, "F32", tmp_path)
