"""What a run of the bench measures, every default filled in."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from ops.bench.errors import BenchError
from ops.bench.parts import cache_folder
from ops.bench.presets import PRESETS, QUICK, TraceSlice, lengths_of
from ops.bench.workload import Lengths, WorkloadShape

ITEMSIZES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
# Bytes of a weight, of layers and of the output layer, where the engine keeps them in another type than it computes in:
# each group of 32 has a scale and a minimum in float16.
QUANTIZED_ITEMSIZES: Final = {"int8": (1.125, 1.125), "int4": (0.625, 1.125)}
# The type of llama.cpp's weights beside each of ours.
LLAMACPP_WEIGHTS: Final = {"none": "F32", "int8": "Q8_0", "int4": "Q4_1"}


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What is measured. peer_pythons: interpreters by peers' names. llamacpp_weights: type of its matrices."""

    model: str
    workload: str
    batches: tuple[int, ...]
    alternations: int
    seed: int
    shape: WorkloadShape
    num_shared: int
    trace: TraceSlice | None
    rounds: int
    min_requests: int
    num_requests: int | None
    peers: tuple[str, ...]
    peer_pythons: dict[str, str]
    llamacpp_weights: str
    dtype: str
    quantization: str
    device: str
    block_size: int
    num_threads: int | None
    engine_mode: str
    cache_dir: str
    is_quick: bool
    measures_steps: bool
    load_format: str = "auto"

    def num_requests_of(self, batch: int) -> int:
        """How many requests of the list are run at this batch."""
        return self.num_requests or max(self.min_requests, self.rounds * batch)

    def lengths_of(self, batch: int) -> list[Lengths]:
        """The lengths of the requests that are run at this batch."""
        return lengths_of(self.shape, self.num_shared, self.trace, self.num_requests_of(batch), self.seed)

    @property
    def engine_config(self) -> dict[str, Any]:
        """What EngineConfig is told, but for the checkpoint and what depends on the batch."""
        return {
            "cache_dir": self.cache_dir,
            "load_format": self.load_format,
            "device": self.device,
            "dtype": self.dtype,
            "block_size": self.block_size,
            "num_threads": self.num_threads,
            "quantization": self.quantization,
        }


def itemsizes_of(quantization: str, dtype: str) -> tuple[float, float]:
    """Bytes of one weight of our engine, which computes in `dtype`: of its layers, and of its output layer."""
    return QUANTIZED_ITEMSIZES.get(quantization, (ITEMSIZES[dtype], ITEMSIZES[dtype]))


def options_from(values: Mapping[str, Any]) -> BenchOptions:
    """The options that the command line's values mean: what was left out comes from the workload's preset.

    Raises BenchError where they don't go together.
    """
    values = dict(values)
    is_quick, workload = values.pop("quick"), values["workload"]
    preset = QUICK if is_quick and workload == "mixed" else PRESETS[workload]
    shape = asdict(preset.shape)
    chosen = {name: shape[name] if values[name] is None else values[name] for name in shape}
    trace = _trace_of(preset.needs_trace, values.pop("trace"), values.pop("scale_lengths"))
    return BenchOptions(
        shape=WorkloadShape(**chosen),
        num_shared=preset.num_shared,
        trace=trace,
        rounds=1 if is_quick else preset.rounds,
        min_requests=min(2, preset.min_requests) if is_quick else preset.min_requests,
        alternations=values.pop("alternations") or (1 if is_quick else preset.alternations),
        batches=values.pop("batches") or preset.batches,
        cache_dir=str(cache_folder(values.pop("cache_dir"))),
        peer_pythons=pythons_by_name(values.pop("peer_python")),
        llamacpp_weights=values.pop("llamacpp_weights") or LLAMACPP_WEIGHTS[values["quantization"]],
        is_quick=is_quick,
        measures_steps=values.pop("steps") and not is_quick,
        **{name: value for name, value in values.items() if name not in shape},
    )


def pythons_by_name(words: tuple[str, ...]) -> dict[str, str]:
    """`NAME=PATH` words as a dictionary. Raises BenchError for another word."""
    pairs = [word.partition("=") for word in words]
    for word, (name, _, path) in zip(words, pairs, strict=True):
        if not name or not path:
            raise BenchError(f"--peer-python {word} says nothing: write NAME=PATH, like vllm=vllm-env/bin/python")
    return {name: path for name, _, path in pairs}


def _trace_of(is_needed: bool, path: str | None, scale_lengths: float) -> TraceSlice | None:
    if is_needed and path is None:
        raise BenchError(
            "--workload azure needs --trace FILE, for instance AzureLLMInferenceTrace_conv.csv of the Azure public "
            "dataset (CC-BY)"
        )
    if path is not None and not is_needed:
        raise BenchError("--trace goes with --workload azure")
    return None if path is None else TraceSlice(path, scale_lengths)
