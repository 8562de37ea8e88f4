"""The workloads that have names, and what the options make of them."""

import statistics
from pathlib import Path
from typing import Any

import pytest

from kernels.int4_weights import INT4
from kernels.weight_formats import INT8
from ops.bench.errors import BenchError
from ops.bench.options import itemsizes_of, options_from
from ops.bench.presets import PRESETS, TraceSlice, lengths_of
from ops.bench.workload import Lengths, make_requests

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def values(**changed: Any) -> dict[str, Any]:
    """What the command line gives where nothing is said."""
    made: dict[str, Any] = dict.fromkeys(
        ("prompt_mean", "prompt_sigma", "output_mean", "output_sigma", "num_requests", "batches", "alternations")
    )
    made |= {"workload": "mixed", "quick": False, "trace": None, "scale_lengths": 0.1, "cache_dir": "/cache"}
    made |= {"peer_python": (), "llamacpp_weights": None, "quantization": "none", "steps": True, "seed": 0}
    made |= {"model": "m", "peers": ("none",), "dtype": "auto", "device": "cpu", "block_size": 16}
    return made | {"num_threads": None, "engine_mode": "process"} | changed


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:15:{second:02}.0000000,{100 * (second + 1)},{10 * (second + 1)}\n" for second in range(20)]
    path.write_text(HEADER + "".join(rows))
    return path


def test_chats_have_the_medians_that_are_said_of_them() -> None:
    lengths = lengths_of(PRESETS["chat"].shape, 0, None, 20_000, seed=1)
    assert statistics.median(each.num_prompt for each in lengths) == pytest.approx(100, rel=0.03)
    assert statistics.median(each.num_output for each in lengths) == pytest.approx(55, rel=0.03)
    assert lengths_of(PRESETS["chat"].shape, 0, None, 20_000, seed=1) == lengths
    assert lengths_of(PRESETS["chat"].shape, 0, None, 20_000, seed=2) != lengths


def test_the_article_s_replies_have_50_tokens_and_a_batch_is_run_once() -> None:
    options = options_from(values(workload="article"))
    for batch in (1, 8, 32):
        assert options.lengths_of(batch) == [Lengths(64, 50)] * batch


def test_the_shared_prompt_comes_before_each_one_s_own() -> None:
    options = options_from(values(workload="shared-prompt"))
    lengths = options.lengths_of(8)
    requests = make_requests(lengths, vocab_size=900, seed=0, salt="a", num_shared=options.num_shared)
    assert min(each.num_prompt for each in lengths) > options.num_shared
    assert [len(each.prompt_ids) for each in requests] == [each.num_prompt for each in lengths]
    assert len({each.prompt_ids[: options.num_shared] for each in requests}) == 1
    assert len({each.prompt_ids[options.num_shared :] for each in requests}) == len(requests)
    others = make_requests(lengths, vocab_size=900, seed=0, salt="b", num_shared=options.num_shared)
    assert others[0].prompt_ids[:16] != requests[0].prompt_ids[:16]


def test_a_prompt_no_longer_than_the_shared_tokens_is_their_beginning() -> None:
    short, long = make_requests([Lengths(5, 1), Lengths(30, 1)], vocab_size=90, seed=0, salt="a", num_shared=20)
    assert short.prompt_ids == long.prompt_ids[:5]


def test_long_contexts_are_long_and_have_fewer_sequences_in_flight() -> None:
    options = options_from(values(workload="long-context"))
    assert options.batches == (1, 4, 8)
    assert min(each.num_prompt for each in options.lengths_of(8)) > 900


def test_a_trace_s_lengths_are_scaled_and_requests_in_a_row_are_taken(trace: Path) -> None:
    options = options_from(values(workload="azure", trace=str(trace), scale_lengths=0.1))
    lengths = options.lengths_of(4)
    first = lengths[0].num_output
    assert lengths == [Lengths(10 * (first + n), first + n) for n in range(8)]
    assert TraceSlice(str(trace), 0.1).arrivals(8, seed=0) == [float(n) for n in range(8)]
    with pytest.raises(BenchError, match=r"has 20 requests, but 64 are to be run"):
        options.lengths_of(32)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"workload": "azure"}, r"--workload azure needs --trace FILE"),
        ({"trace": "x.csv"}, r"--trace goes with --workload azure"),
        ({"peer_python": ("vllm",)}, r"write NAME=PATH"),
    ],
)
def test_options_that_do_not_go_together_are_refused(changed: dict[str, Any], line: str) -> None:
    with pytest.raises(BenchError, match=line):
        options_from(values(**changed))


def test_what_is_left_out_comes_from_the_workload_and_what_is_said_stays() -> None:
    options = options_from(values(workload="chat", output_mean=7.0, batches=(2,), alternations=5))
    assert options.shape.output_mean == 7.0
    assert options.shape.prompt_mean == PRESETS["chat"].shape.prompt_mean
    assert (options.batches, options.alternations, options.measures_steps) == ((2,), 5, True)
    quick = options_from(values(quick=True))
    assert (quick.alternations, quick.num_requests_of(1), quick.measures_steps) == (1, 2, False)
    assert quick.shape.output_mean == 8


def test_quantization_is_our_engine_s_alone_and_llama_cpp_s_weights_follow_it() -> None:
    plain, quantized = options_from(values()), options_from(values(quantization="int8"))
    assert (plain.engine_config["quantization"], quantized.engine_config["quantization"]) == ("none", "int8")
    assert (plain.llamacpp_weights, quantized.llamacpp_weights) == ("F32", "Q8_0")
    assert options_from(values(quantization="int8", llamacpp_weights="F16")).llamacpp_weights == "F16"
    assert itemsizes_of("none", "bfloat16") == (2, 2)
    assert itemsizes_of("int8", "float32") == (INT8.bytes_per_weight, INT8.bytes_per_weight)
    assert itemsizes_of("int4", "float32") == (INT4.bytes_per_weight, INT8.bytes_per_weight)
    assert options_from(values(quantization="int4")).llamacpp_weights == "Q4_1"
