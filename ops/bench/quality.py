"""`pagemill bench quality`: what quantized weights, or a cache in 8 bits, change in predictions of a fixed text.

The model in float32 and the model with what is judged read the same text, token by token as it stands (teacher
forcing), and each position's two distributions over the vocabulary are compared.
"""

import hashlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from ops.bench.errors import BenchError
from ops.bench.flags import cache_dir_option, json_option, model_option, num_threads_option
from ops.bench.machine import machine_facts
from ops.bench.measure import say
from ops.bench.parts import cache_folder, checkpoint_path
from ops.bench.quality_text import TEXT
from ops.bench.result import publish
from ops.params import COUNT
from ops.tables import print_table

if TYPE_CHECKING:
    import torch

    from model.decoder import Decoder

    Tensor = torch.Tensor

# Tokens that a prediction can look back to: the text is read in windows of so many.
WINDOW: Final = 1024
# Positions whose logits exist at once.
CHUNK: Final = 128
BLOCK_SIZE: Final = 16
COLUMNS: Final = ("judged", "perplexity", "KL mean", "KL p99", "KL max", "same greedy token")


@dataclass(frozen=True, slots=True)
class Quality:
    """How far predictions are from those of float32. KL divergences are of float32 from what is judged, in nats."""

    num_tokens: int
    kl_mean: float
    kl_p99: float
    kl_max: float
    greedy_agreement: float
    perplexity_float32: float
    perplexity: float


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@model_option
@click.option(
    "--quantization",
    type=click.Choice(["int8", "int4", "none"]),
    default="int8",
    help="Of the weights that are judged.",
)
@click.option(
    "--kv-cache-dtype", type=click.Choice(["auto", "fp8_e4m3"]), default="auto", help="Of the KV cache that is judged."
)
@click.option(
    "--unround",
    is_flag=True,
    help="Move each weight of both sides by up to half a step first, as if the file had never been rounded.",
)
@click.option("--num-tokens", type=COUNT, default=2000, help="Of the text; no more than it has.")
@num_threads_option
@cache_dir_option
@json_option
def command(
    model: str,
    quantization: str,
    kv_cache_dtype: str,
    unround: bool,
    num_tokens: int,
    num_threads: int | None,
    cache_dir: str | None,
    json_file: str | None,
) -> None:
    """Compare quantized weights, a KV cache in 8 bits, or both with float32 on 2,000 tokens of fixed text, on the CPU.

    KL divergence of the next token's distribution, how often the most likely token is the same one, and the perplexity
    of both. A table goes to stdout, one JSON object as its last line.
    """
    if quantization == "none" and kv_cache_dtype == "auto":
        raise BenchError("nothing differs from float32: give --quantization, or --kv-cache-dtype fp8_e4m3")
    if quantization == "none" and unround:
        raise BenchError("--unround moves weights by steps of their quantization: give --quantization")
    started = time.monotonic()
    folder = cache_folder(cache_dir)
    path = checkpoint_path(model, folder)
    ids = _text_ids(path, num_tokens)
    quality = _measure(path, folder, ids, (quantization, kv_cache_dtype), unround, num_threads)
    judged = [] if quantization == "none" else [quantization]
    judged += [] if kv_cache_dtype == "auto" else [f"KV cache {kv_cache_dtype}"]
    moved = ", weights moved" if unround else ""
    rows = [
        (f"float32{moved}", f"{quality.perplexity_float32:.3f}", "", "", "", ""),
        (
            ", ".join(judged) + moved,
            f"{quality.perplexity:.3f}",
            *(f"{value:.5f}" for value in (quality.kl_mean, quality.kl_p99, quality.kl_max)),
            f"{quality.greedy_agreement:.2%}",
        ),
    ]
    print_table(f"Predictions of {quality.num_tokens} tokens", COLUMNS, rows)
    report = {
        "bench": "pagemill quality",
        "machine": machine_facts(),
        "model": path.stem,
        "quantization": quantization,
        "kv_cache_dtype": kv_cache_dtype,
        "is_unrounded": unround,
        "ids_sha256": hashlib.sha256(json.dumps(ids).encode()).hexdigest(),
        "window": WINDOW,
        **asdict(quality),
        "took_s": time.monotonic() - started,
    }
    publish(report, json_file)


def _text_ids(path: Path, num_tokens: int) -> list[int]:
    from model.errors import ModelError
    from model.tokenizer import Tokenizer

    try:
        ids = Tokenizer.from_checkpoint(path).encode(TEXT)
    except ModelError as error:
        raise BenchError(str(error)) from error
    if len(ids) <= num_tokens:
        say(f"the text has {len(ids)} tokens: all of them but the first are predicted")
    return ids[: num_tokens + 1]


def _measure(
    path: Path, cache_dir: Path, ids: list[int], judged: tuple[str, str], is_unrounded: bool, num_threads: int | None
) -> Quality:
    import torch

    from model.decoder import Decoder
    from model.errors import ModelError
    from model.kv_cache_dtype import pick_kv_dtype
    from model.loader import load_checkpoint
    from model.threads import set_num_threads
    from ops.bench.unrounded import UnroundedWeights

    set_num_threads(num_threads)

    def load(kind: str, cache: str) -> Decoder:
        say(f"loading the model with quantization {kind} and a KV cache of {cache}")
        kv_dtype = pick_kv_dtype(cache, torch.float32, torch.device("cpu"))
        checkpoint = load_checkpoint(path, cache_dir=cache_dir)
        weights = UnroundedWeights(checkpoint.weights, judged[0]) if is_unrounded else checkpoint.weights
        return Decoder(checkpoint.config, weights, quantization=kind, kv_dtype=kv_dtype)

    try:
        plain, quantized = load("none", "auto"), load(*judged)
    except ModelError as error:
        raise BenchError(str(error)) from error
    say(f"reading {len(ids)} tokens with both")
    with torch.inference_mode():
        return compare(plain, quantized, ids)


def compare(plain: "Decoder", judged: "Decoder", ids: list[int]) -> Quality:
    """Both decoders over the text. Every token but the first of each window is predicted from those before it."""
    import torch

    kls, are_same, plain_nll, nll = [], [], 0.0, 0.0
    for log_p, log_q, following in _predictions(plain, judged, ids):
        kls.append((log_p.exp() * (log_p - log_q)).sum(dim=1).clamp(min=0))
        are_same.append(log_p.argmax(dim=1) == log_q.argmax(dim=1))
        plain_nll -= float(log_p.gather(1, following[:, None]).sum())
        nll -= float(log_q.gather(1, following[:, None]).sum())
    kl, same = torch.cat(kls), torch.cat(are_same)
    return Quality(
        len(kl),
        float(kl.mean()),
        float(kl.quantile(0.99)),
        float(kl.max()),
        float(same.double().mean()),
        math.exp(plain_nll / len(kl)),
        math.exp(nll / len(kl)),
    )


def _predictions(plain: "Decoder", judged: "Decoder", ids: list[int]) -> "Iterator[tuple[Tensor, Tensor, Tensor]]":
    """Log-probabilities of both, float64 [n, vocab_size], and the ids that follow [n], piece by piece."""
    import torch

    window = min(WINDOW, plain.config.max_position_embeddings - 1)
    for start in range(0, len(ids) - 1, window):
        read = ids[start : start + window + 1]
        caches = [_empty_cache(decoder, len(read)) for decoder in (plain, judged)]
        for first in range(0, len(read) - 1, CHUNK):
            piece = read[first : min(first + CHUNK, len(read) - 1)]
            log_p, log_q = (
                _logits(decoder, cache, piece, first).double().log_softmax(dim=1)
                for decoder, cache in zip((plain, judged), caches, strict=True)
            )
            yield log_p, log_q, torch.tensor(read[first + 1 : first + 1 + len(piece)])


def _empty_cache(decoder: "Decoder", num_tokens: int) -> "Tensor":
    import torch

    config, num_blocks = decoder.config, -(-num_tokens // BLOCK_SIZE)
    shape = (num_blocks, config.num_layers, 2, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    return torch.zeros(shape, dtype=decoder.kv_dtype)


def _logits(decoder: "Decoder", kv_cache: "Tensor", ids: list[int], first: int) -> "Tensor":
    """Of a chunk whose predecessors are in the cache, which it is written to."""
    import torch

    from kernels.paged_attention import AttentionMetadata

    end = first + len(ids)
    meta = AttentionMetadata(
        torch.arange(len(kv_cache), dtype=torch.int32)[None],
        torch.tensor([0, len(ids)], dtype=torch.int32),
        torch.tensor([end], dtype=torch.int32),
        len(ids),
        end,
    )
    places = torch.arange(first, end)
    logits: Tensor = decoder.forward(torch.tensor(ids), places, places, kv_cache=kv_cache, meta=meta, logits_rows=None)
    return logits
