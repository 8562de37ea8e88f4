"""Micro-bench of the CPU kernels: `python -m ops.bench.kernels`.

Shapes are those of SmolLM2-135M. A decode reads each weight and each key once, so its limit is memory: GB/s beside the
read bandwidth. A prompt computes with each weight many times, so its limit is arithmetic: GFLOP/s beside the product of
two square matrices. Each kernel also runs on torch operators, in turns with the compiled one. Prints a table and one
JSON line; progress goes to stderr. The row kernels' operands fit the caches, so they may pass the limit of memory.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch

import kernels
from kernels.activation import silu_and_mul
from kernels.dispatch import implementation
from kernels.int4_weights import INT4
from kernels.kv_cache_write import rope_and_write
from kernels.linear import PackedLinear
from kernels.memory import empty_in_huge_pages
from kernels.paged_attention import AttentionMetadata, paged_attention
from kernels.penalties import Penalties, apply_penalties
from kernels.quantized_linear import QuantizedLinear
from kernels.rms_norm import add_rms_norm
from kernels.sampling import sample
from kernels.weight_formats import INT8
from ops.bench.limits import Limits

NUM_LAYERS, HIDDEN, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, FEED_FORWARD, VOCAB = 30, 576, 9, 3, 64, 1536, 49152
BLOCK_SIZE = 16
NUM_RUNS = 5
# Sequences, keys of each, query rows of each.
ATTENTION_SHAPES = ((1, 256, 1), (8, 150, 1), (32, 150, 1), (8, 1000, 1), (32, 1000, 1), (1, 512, 512), (1, 2048, 512))


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel call to time: what it does, and what it must at least read or compute."""

    name: str
    compiled: Callable[[], object]
    torch_operators: Callable[[], object]
    num_bytes: float
    num_flops: float


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    ms: float
    torch_ms: float
    gb_per_s: float
    gflop_per_s: float
    share_of_limit: float


def linear_cases() -> list[Case]:
    """The output layer, whose weight is larger than any cache, by number of rows."""
    weight = torch.randn(VOCAB, HIDDEN)
    layers = (
        ("linear", PackedLinear(weight), 4.0),
        ("int8 linear", QuantizedLinear(weight), INT8.bytes_per_weight),
        ("int4 linear", QuantizedLinear(weight, form=INT4), INT4.bytes_per_weight),
    )
    return [
        Case(
            f"{name} 49152×576, {num_rows} rows",
            partial(layer, x),
            partial(torch.nn.functional.linear, x, weight),
            weight.numel() * bytes_per_weight,
            2 * weight.numel() * num_rows,
        )
        for num_rows, x in ((n, torch.randn(n, HIDDEN)) for n in (1, 4, 8, 32, 512))
        for name, layer, bytes_per_weight in layers
    ]


def attention_cases(num_seqs: int, context_len: int, query_len: int) -> list[Case]:
    """All layers of one step over a cache of shuffled blocks."""
    blocks_per_seq = -(-context_len // BLOCK_SIZE)
    num_blocks = num_seqs * blocks_per_seq
    kv_cache = empty_in_huge_pages((num_blocks, NUM_LAYERS, 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM))
    kv_cache.normal_()
    meta = AttentionMetadata(
        torch.randperm(num_blocks).view(num_seqs, blocks_per_seq).int(),
        torch.arange(num_seqs + 1).int() * query_len,
        torch.full((num_seqs,), context_len, dtype=torch.int32),
        query_len,
        context_len,
    )
    query = torch.randn(num_seqs * query_len, NUM_HEADS, HEAD_DIM)

    def all_layers() -> None:
        for layer in range(NUM_LAYERS):
            paged_attention(query, kv_cache, layer, meta, HEAD_DIM**-0.5)

    def all_layers_with_torch() -> None:
        with implementation("torch"):
            all_layers()

    num_pairs = num_seqs * query_len * (context_len - (query_len - 1) / 2)
    what = "decode" if query_len == 1 else f"chunk of {query_len}"
    return [
        Case(
            f"attention, {NUM_LAYERS} layers, {num_seqs} × {context_len}, {what}",
            all_layers,
            all_layers_with_torch,
            num_seqs * context_len * NUM_LAYERS * 2 * NUM_KV_HEADS * HEAD_DIM * 4,
            4 * num_pairs * NUM_HEADS * HEAD_DIM * NUM_LAYERS,
        )
    ]


def row_cases() -> list[Case]:
    """The small kernels at 32 rows, 30 calls each: what one step of a batch of 32 makes."""
    x, residual, weight = torch.randn(32, HIDDEN), torch.randn(32, HIDDEN), torch.randn(HIDDEN)
    gate_up = torch.randn(32, 2 * FEED_FORWARD)
    num_columns = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    qkv, table = torch.randn(32, num_columns), torch.randn(64, HEAD_DIM)
    kv_cache = torch.zeros(4, 1, 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    tokens = torch.arange(32)
    calls: list[tuple[str, Callable[[], object], int]] = [
        ("add_rms_norm", lambda: add_rms_norm(x, residual, weight, 1e-5), 16 * x.numel()),
        ("silu_and_mul", lambda: silu_and_mul(gate_up), 6 * gate_up.numel()),
        (
            "rope_and_write",
            lambda: rope_and_write(qkv, table, tokens, tokens, kv_cache, 0, NUM_HEADS, NUM_KV_HEADS),
            8 * qkv.numel(),
        ),
    ]
    return [case_of(f"{name}, 32 rows, 30 calls", call, 30, num_bytes) for name, call, num_bytes in calls]


def sampling_cases() -> list[Case]:
    """32 rows of logits, by what they ask for."""
    logits = torch.randn(32, VOCAB) * 4
    ones, seeds = torch.ones(32), torch.arange(32)
    cases = []
    for name, temperature, top_k, top_p, min_p in (
        ("greedy", 0.0, 0, 1.0, 0.0),
        ("temperature", 1.0, 0, 1.0, 0.0),
        ("min-p 0.1", 1.0, 0, 1.0, 0.1),
        ("top-k 50", 1.0, 50, 1.0, 0.0),
        ("top-p 0.9", 1.0, 0, 0.9, 0.0),
    ):
        args = (logits, ones * temperature, torch.full((32,), top_k), ones * top_p, seeds, seeds, VOCAB, ones * min_p)
        cases.append(case_of(f"sample, 32 rows, {name}", partial(sample, *args), 1, logits.numel() * 4))
    tokens, lengths = torch.randint(VOCAB, (32, 1000)), torch.full((32,), 1000)
    penalties = Penalties(tokens, seeds, lengths // 2, lengths, ones * 1.1, ones * 0.1, ones * 0.1)
    call = partial(apply_penalties, logits.clone(), penalties)
    cases.append(case_of("penalties, 32 rows, 1000 tokens each", call, 1, tokens.numel() * 8))
    return cases


def case_of(name: str, call: Callable[[], object], num_calls: int, num_bytes: int) -> Case:
    """A case of repeated calls whose other side is the same call on torch operators."""

    def repeat() -> None:
        for _ in range(num_calls):
            call()

    def repeat_with_torch() -> None:
        with implementation("torch"):
            repeat()

    return Case(name, repeat, repeat_with_torch, num_calls * num_bytes, 0)


def measure(case: Case) -> tuple[float, float]:
    """Shortest seconds of both sides, taken in turns after one turn that warms up."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(NUM_RUNS + 1):
        for call, taken in zip((case.compiled, case.torch_operators), times, strict=True):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    return min(times[0][1:]), min(times[1][1:])


def row_of(case: Case, seconds: float, torch_seconds: float, bandwidth: float, flops: float) -> Row:
    """A line of the table. Its share of the limit: the time that memory or arithmetic needs at least, of that taken."""
    return Row(
        case.name,
        1e3 * seconds,
        1e3 * torch_seconds,
        case.num_bytes / seconds / 1e9,
        case.num_flops / seconds / 1e9,
        max(case.num_bytes / bandwidth, case.num_flops / flops) / seconds,
    )


def main() -> None:
    kernels.warmup(torch.float32, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS)
    torch.manual_seed(0)
    limits = Limits("float32", "cpu", None)
    measured = [limits.measure()]
    makers: list[Callable[[], list[Case]]] = [
        linear_cases,
        *(partial(attention_cases, *shape) for shape in ATTENTION_SHAPES),
        row_cases,
        sampling_cases,
    ]
    timed = []
    for make in makers:
        for case in make():
            print(f"timing {case.name}", file=sys.stderr, flush=True)
            timed.append((case, *measure(case)))
    # Before and after: what else runs on the machine makes the limits smaller too, and the larger one is the truer.
    measured.append(limits.measure())
    bandwidth, flops = (max(m[name] for m in measured) for name in ("read_bytes_per_s", "operations_per_s"))
    rows = [row_of(case, seconds, torch_seconds, bandwidth, flops) for case, seconds, torch_seconds in timed]
    threads = measured[0]["threads"]
    print(f"{threads} threads; limits: read {bandwidth / 1e9:.1f} GB/s, matmul {flops / 1e9:.0f} GFLOP/s")
    print(f"{'kernel':52} {'ms':>9} {'torch ms':>9} {'GB/s':>7} {'GFLOP/s':>8} {'of limit':>8}")
    for row in rows:
        print(
            f"{row.name:52} {row.ms:9.3f} {row.torch_ms:9.3f} {row.gb_per_s:7.1f} {row.gflop_per_s:8.1f}"
            f" {row.share_of_limit:8.0%}"
        )
    line = {"num_threads": threads, "read_gb_per_s": bandwidth / 1e9, "matmul_gflop_per_s": flops / 1e9}
    print(json.dumps({"bench": "kernels", **line, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
