"""Measurements of a GPU check, one a process: `python -m tests.gpu.bench NAME FILE.json`.

Each measures the limit that it is held against in the same run.
"""

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kernels.attention_inputs import AttentionMetadata
from kernels.paged_attention import paged_attention
from model.kv_cache import KVCache
from model.loader import load_config
from scheduler.output import BlockCopy, Transfer
from scheduler.sampling_params import SamplingParams
from tests.gpu.models import DTYPE, our_engine, shapes_of, transformers_model
from tests.gpu.timing import DEVICE, copy_bytes_per_s, median_s, products_per_s, sized, wait
from worker.engine import Engine, EngineRequest

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = sized(32, 4), sized(8, 1), sized(128, 16)
BLOCK_SIZE = 16
# Sequences and keys of each; the first is the one with a bar.
DECODES = ((64, 4096), (64, 1024), (32, 256), (8, 8192), (1, 32768))
# Sequences, query rows and keys of each.
PREFILLS = ((1, 8192, 8192), (4, 2048, 2048), (1, 2048, 16384))
BATCHES = (1, 8, 32)
NUM_OUTPUT = sized(50, 4)


def attention(num_seqs: int, query_len: int, context_len: int, *, is_deterministic: bool) -> float:
    """Seconds of one layer's call over shuffled blocks, by turns over layers that together are larger than the L2."""
    num_seqs, query_len, context_len = sized(num_seqs, 2), sized(query_len, min(8, query_len)), sized(context_len, 40)
    blocks_per_seq = -(-context_len // BLOCK_SIZE)
    num_blocks = num_seqs * blocks_per_seq
    layer_bytes = num_blocks * 2 * BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM * 2
    num_layers = max(2, min(32, -(-sized(256 << 20, 1) // layer_bytes)))
    shape = (num_blocks, num_layers, 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    cache = torch.empty(shape, dtype=DTYPE, device=DEVICE).normal_()
    meta = AttentionMetadata(
        torch.randperm(num_blocks, device=DEVICE).view(num_seqs, blocks_per_seq).int(),
        torch.arange(num_seqs + 1, device=DEVICE).int() * query_len,
        torch.full((num_seqs,), context_len, dtype=torch.int32, device=DEVICE),
        query_len,
        context_len,
        is_deterministic,
    )
    query = torch.randn((num_seqs * query_len, NUM_HEADS, HEAD_DIM), device=DEVICE).to(DTYPE)
    return median_s(lambda n: paged_attention(query, cache, n % num_layers, meta, HEAD_DIM**-0.5))


def decode_attention() -> dict[str, Any]:
    """Key and value bytes a second, as a share of a copy's bytes read and written a second."""
    copy_rate = copy_bytes_per_s()
    figures: dict[str, Any] = {"copy_gb_per_s": copy_rate / 1e9}
    for num_seqs, context_len in DECODES:
        num_bytes = num_seqs * context_len * 2 * NUM_KV_HEADS * HEAD_DIM * DTYPE.itemsize
        for is_deterministic in (True, False):
            seconds = attention(num_seqs, 1, context_len, is_deterministic=is_deterministic)
            name = f"{num_seqs}x{context_len}{'' if is_deterministic else '_by_batch'}"
            figures[f"{name}_us"] = seconds * 1e6
            figures[f"{name}_share"] = num_bytes / seconds / copy_rate
    figures["share_of_copy"] = figures["64x4096_share"]
    return figures


def prefill_attention() -> dict[str, Any]:
    """Operations a second of causal attention, as a share of a large product's."""
    rate = products_per_s(DTYPE)
    figures: dict[str, Any] = {"product_tflop_per_s": rate / 1e12}
    for num_seqs, query_len, context_len in PREFILLS:
        num_pairs = num_seqs * query_len * (context_len - (query_len - 1) / 2)
        seconds = attention(num_seqs, query_len, context_len, is_deterministic=True)
        name = f"{num_seqs}x{query_len}_of_{context_len}"
        figures[f"{name}_us"] = seconds * 1e6
        figures[f"{name}_share"] = 4 * num_pairs * NUM_HEADS * HEAD_DIM / seconds / rate
    figures["share_of_products"] = figures["1x8192_of_8192_share"]
    return figures


def swap() -> dict[str, Any]:
    """Blocks of Llama-3.1-8B to pinned memory and back, beside one copy of as many bytes from one piece of it."""
    num_blocks = sized(512, 4)
    config = load_config(shapes_of("Llama-3.1-8B"), "dummy")
    cache = KVCache(
        config,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        dtype=DTYPE,
        device=DEVICE,
        num_cpu_blocks=num_blocks,
    )
    num_bytes = num_blocks * cache.block_bytes
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=DEVICE.type == "cuda")
    device = cache.blocks.view(torch.uint8).view(-1)
    figures: dict[str, Any] = {"block_bytes": cache.block_bytes, "num_blocks": num_blocks}
    limits = {
        "out": num_bytes / _host_median(lambda: host.copy_(device, non_blocking=True)),
        "in": num_bytes / _host_median(lambda: device.copy_(host, non_blocking=True)),
    }
    shuffled = random.Random(0).sample(range(num_blocks), num_blocks)
    orders = {"": list(range(num_blocks)), "_shuffled": shuffled}
    for suffix, order in orders.items():
        pairs = tuple(BlockCopy(src, dst) for src, dst in zip(order, range(num_blocks), strict=True))
        back = tuple(BlockCopy(copy.dst, copy.src) for copy in pairs)
        for way, copies in (("out", pairs), ("in", back)):
            transfers = [Transfer(0, copies)]
            outs, ins = (transfers, []) if way == "out" else ([], transfers)
            seconds = _host_median(lambda outs=outs, ins=ins: _swap(cache, outs, ins))  # type: ignore[misc]
            figures[f"{way}{suffix}_gb_per_s"] = num_bytes / seconds / 1e9
            figures[f"share_{way}{suffix}"] = num_bytes / seconds / limits[way]
    return figures | {f"pinned_{way}_gb_per_s": rate / 1e9 for way, rate in limits.items()}


def _swap(cache: KVCache, outs: list[Transfer], ins: list[Transfer]) -> None:
    cache.begin_transfers(outs, ins)
    (result,) = cache.ended_transfers(is_waiting=True)
    if result.failed_dst:
        raise RuntimeError(f"{len(result.failed_dst)} blocks came back damaged")


def _host_median(work: Callable[[], object], num_runs: int = 7) -> float:
    taken = []
    for _ in range(sized(num_runs, 2) + 1):
        wait()
        started = time.perf_counter()
        work()
        wait()
        taken.append(time.perf_counter() - started)
    return sorted(taken[1:])[len(taken[1:]) // 2]


def host_share() -> dict[str, Any]:
    """Decode steps of 64 sequences of Llama-3.1-8B: how long the device has nothing to do, of the whole step."""
    num_seqs, num_steps = sized(64, 2), sized(60, 3)
    figures: dict[str, Any] = {}
    for name, cuda_graphs in (("", True), ("_eager", False)):
        blocks = num_seqs * -(-sized(1024, 64) // BLOCK_SIZE)
        engine, info = our_engine(
            shapes_of("Llama-3.1-8B"),
            num_kv_blocks=blocks,
            max_num_seqs=num_seqs,
            max_model_len=sized(2048, 64),
            cuda_graphs=cuda_graphs,
        )
        add(engine, num_seqs, num_prompt=sized(400, 9), num_output=sized(400, 40))
        for _ in range(sized(30, 4)):
            engine.step()
        before = engine.times.num_steps
        wait()
        started = time.perf_counter()
        for _ in range(num_steps):
            engine.step()
        wait()
        step_s = (time.perf_counter() - started) / (engine.times.num_steps - before)
        busy_s = _busy_s(engine, sized(10, 1))
        figures |= {
            f"step_ms{name}": step_s * 1e3,
            f"device_busy_ms{name}": busy_s * 1e3,
            f"exposed{name}": max(0.0, 1 - busy_s / step_s),
            f"num_cuda_graphs{name}": info.num_cuda_graphs,
            f"graph_mib{name}": info.graph_bytes / (1 << 20),
        }
        del engine
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
    return figures


def _busy_s(engine: Engine, num_steps: int) -> float:
    """Seconds a step that kernels and copies run, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CUDA if DEVICE.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiled:
        for _ in range(num_steps):
            engine.step()
        wait()
    name = "self_device_time_total" if DEVICE.type == "cuda" else "self_cpu_time_total"
    return sum([float(getattr(event, name)) for event in profiled.key_averages()]) / 1e6 / num_steps


def article() -> dict[str, Any]:
    """Llama-2-13B's shapes, replies of 50 tokens: output tokens a second of ours and of transformers' static batch."""
    path, num_prompt = shapes_of("Llama-2-13B"), sized(128, 9)
    rng = random.Random(0)
    prompts = [[rng.randrange(250) for _ in range(num_prompt)] for _ in range(max(BATCHES))]
    blocks = max(BATCHES) * -(-(num_prompt + NUM_OUTPUT + 1) // BLOCK_SIZE)
    engine, _ = our_engine(
        path, num_kv_blocks=blocks, max_num_seqs=max(BATCHES), max_model_len=sized(512, 64), enable_prefix_caching=False
    )
    peer = transformers_model(path)
    sides: dict[str, Callable[[list[list[int]]], list[list[int]]]] = {
        "ours": lambda batch: _ours(engine, batch),
        "transformers": lambda batch: _theirs(peer, batch),
    }
    figures: dict[str, Any] = {}
    for batch in BATCHES:
        rates: dict[str, list[float]] = {name: [] for name in sides}
        ids = {}
        for turn in range(3):  # the first is to warm up
            for name, side in sides.items():
                wait()
                started = time.perf_counter()
                ids[name] = side(prompts[:batch])
                wait()
                if turn:
                    rates[name].append(batch * NUM_OUTPUT / (time.perf_counter() - started))
        best = {name: max(each) for name, each in rates.items()}
        figures |= {f"{name}_{batch}_tokens_per_s": rate for name, rate in best.items()}
        figures[f"ratio_{batch}"] = best["ours"] / best["transformers"]
        pairs = [pair for mine, other in zip(*ids.values(), strict=True) for pair in zip(mine, other, strict=True)]
        figures[f"equal_ids_{batch}"] = sum(mine == other for mine, other in pairs) / len(pairs)
    return figures


def add(engine: Engine, num_seqs: int, *, num_prompt: int, num_output: int) -> None:
    """Requests of random prompts."""
    rng = random.Random(0)
    for number in range(num_seqs):
        prompt = tuple(rng.randrange(250) for _ in range(num_prompt))
        engine.add(EngineRequest(f"r{number}", prompt, _greedy(num_output), seed=0))


def _greedy(num_output: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)


def _ours(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    ids: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    for number, prompt in enumerate(prompts):
        engine.add(EngineRequest(str(number), tuple(prompt), _greedy(NUM_OUTPUT), seed=0))
    while engine.has_work:
        for output in engine.step():
            ids[output.seq_id] += output.new_token_ids
    return list(ids.values())


@torch.inference_mode()
def _theirs(peer: Any, prompts: list[list[int]]) -> list[list[int]]:
    input_ids = torch.tensor(prompts, device=DEVICE)
    made = peer.generate(input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=NUM_OUTPUT)
    ids: list[list[int]] = made[:, input_ids.shape[1] :].tolist()
    return ids


def main() -> None:
    """Run one measurement and write its figures."""
    measurements: dict[str, Callable[[], dict[str, Any]]] = {
        each.__name__: each for each in (decode_attention, prefill_attention, swap, host_share, article)
    }
    torch.manual_seed(0)
    figures = measurements[sys.argv[1]]()
    Path(sys.argv[2]).write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
