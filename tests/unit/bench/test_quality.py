"""`pagemill bench quality`: what it says of equal, of slightly different and of the demo model's predictions."""

import json
import math
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from kernels.int4_weights import INT4
from kernels.quantized_linear import QuantizedLinear
from model.decoder import Decoder
from model.weights import random_weights
from ops.bench.cli import main
from ops.bench.errors import BenchError
from ops.bench.quality import COLUMNS, compare
from ops.bench.unrounded import UnroundedWeights
from tests.tiny_checkpoint import write_tiny_checkpoint
from tests.unit.model_runner.driver import tiny_config

IDS = [(7 * n + n * n) % 199 for n in range(300)]


def decoder_of(seed: int, quantization: str = "none") -> Decoder:
    """Its context of 128 is shorter than the text, and its windows are."""
    config = tiny_config()
    return Decoder(config, random_weights(config, seed=seed), quantization=quantization)


def test_a_model_differs_in_nothing_from_itself() -> None:
    with torch.inference_mode():
        quality = compare(decoder_of(1), decoder_of(1), IDS)
    assert quality.num_tokens == len(IDS) - 1
    assert quality.kl_max < 1e-9
    assert quality.greedy_agreement == 1
    assert quality.perplexity == quality.perplexity_float32


def test_another_model_differs_and_a_quantized_one_hardly() -> None:
    with torch.inference_mode():
        other = compare(decoder_of(1), decoder_of(2), IDS)
        quantized = compare(decoder_of(1), decoder_of(1, "int8"), IDS)
        of_4_bits = compare(decoder_of(1), decoder_of(1, "int4"), IDS)
    assert 0 < quantized.kl_mean < quantized.kl_p99 <= quantized.kl_max < 0.01 < other.kl_mean
    assert quantized.kl_mean < of_4_bits.kl_mean < 0.1 * other.kl_mean
    assert other.greedy_agreement < 0.5 < quantized.greedy_agreement


def test_the_figures_are_those_of_the_distributions() -> None:
    """Of two models that predict from the embedding alone, against sums written out."""
    config = tiny_config(num_layers=1, tie_word_embeddings=False)
    plain, quantized = random_weights(config, seed=3), random_weights(config, seed=3)
    for weights in (plain, quantized):
        for name in weights:
            if "o_proj" in name or "down_proj" in name:
                weights[name].zero_()
    quantized["model.norm.weight"] *= 1.1
    with torch.inference_mode():
        p, q = (_next_tokens(weights) for weights in (plain, quantized))
        quality = compare(Decoder(config, plain), Decoder(config, quantized), IDS)
    read, following = torch.tensor(IDS[:-1]), torch.tensor(IDS[1:])
    p, q = p[read], q[read]
    kl = (p.exp() * (p - q)).sum(dim=1)
    assert quality.kl_mean == pytest.approx(float(kl.mean()), rel=1e-3)
    assert quality.kl_max == pytest.approx(float(kl.max()), rel=1e-3)
    nll = [-float(side[torch.arange(len(read)), following].mean()) for side in (p, q)]
    assert quality.perplexity_float32 == pytest.approx(math.exp(nll[0]), rel=1e-4)
    assert quality.perplexity == pytest.approx(math.exp(nll[1]), rel=1e-4)


def _next_tokens(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Log-probabilities [token, next token] of a model whose layers add nothing."""
    table = weights["model.embed_tokens.weight"].double()
    normed = table / (table.square().mean(dim=1, keepdim=True) + tiny_config().rms_norm_eps).sqrt()
    return (normed * weights["model.norm.weight"].double() @ weights["lm_head.weight"].double().T).log_softmax(dim=1)


def test_the_command_prints_a_table_and_one_json_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny_checkpoint(tmp_path)
    words = ["quality", "--model", folder, "--cache-dir", tmp_path, "--num-tokens", 400, "--num-threads", 1]
    assert main([str(word) for word in words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("\t") == list(COLUMNS)
    assert [line.split("\t")[0] for line in lines[1:-1]] == ["float32", "int8"]
    report = json.loads(lines[-1])
    assert report["num_tokens"] == 400
    assert len(report["ids_sha256"]) == 64
    assert report["greedy_agreement"] > 0.8


def test_a_cache_in_8_bits_is_judged_alone_or_with_the_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["quality", "--model", write_tiny_checkpoint(tmp_path), "--cache-dir", tmp_path, "--num-tokens", 100]
    words += ["--num-threads", 1, "--kv-cache-dtype", "fp8_e4m3", "--quantization"]
    divergences = []
    for quantization, name in (("none", "KV cache fp8_e4m3"), ("int8", "int8, KV cache fp8_e4m3")):
        assert main([str(word) for word in [*words, quantization]]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[2].split("\t")[0] == name
        divergences.append(json.loads(lines[-1])["kl_mean"])
    assert 0 < divergences[0] != divergences[1]


def test_a_comparison_of_float32_with_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="nothing differs from float32: give --quantization, or --kv-cache-dtype"):
        main(["quality", "--model", str(tmp_path), "--quantization", "none"])
    with pytest.raises(BenchError, match="give --quantization"):
        main(
            ["quality", "--model", str(tmp_path), "--quantization", "none", "--kv-cache-dtype", "fp8_e4m3", "--unround"]
        )


def test_a_file_of_4_bits_loses_nothing_by_int4_until_it_is_unrounded() -> None:
    config = tiny_config()
    rounded = {name: _with_4_bits(each) for name, each in random_weights(config, seed=1).items()}
    unrounded = UnroundedWeights(rounded, "int4")
    with torch.inference_mode():
        as_it_is, moved = (
            compare(Decoder(config, weights), Decoder(config, weights, quantization="int4"), IDS)
            for weights in (MappingProxyType(rounded), unrounded)
        )
    assert as_it_is.kl_mean < 0.02 * moved.kl_mean
    names = [name for name, each in rounded.items() if each.ndim == 2]
    for name in names:
        step = (rounded[name] - unrounded[name]).abs().max() / (rounded[name].max() - rounded[name].min())
        assert 0 < step < 0.5 / (255 if "embed" in name else 15)
        assert torch.equal(unrounded[name], unrounded[name])


def _with_4_bits(tensor: torch.Tensor) -> torch.Tensor:
    return QuantizedLinear(tensor, form=INT4).weight() if tensor.ndim == 2 else tensor


def test_a_model_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="nowhere"):
        main(["quality", "--model", str(tmp_path / "nowhere"), "--num-threads", "1"])


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_demo_models_predictions_stay(
    quantization: str, demo_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On 2,000 tokens the divergence is 0.0003 with both, since the file has 4 bits, and 98 % of greedy tokens stay."""
    words = ["quality", "--model", str(demo_model_path), "--quantization", quantization, "--num-tokens", "150"]
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["kl_mean"] < 0.001
    assert report["greedy_agreement"] > 0.95
    assert report["perplexity"] == pytest.approx(report["perplexity_float32"], rel=0.01)


def test_rows_say_that_weights_were_moved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A float32 of moved weights is another one than the file's."""
    model = str(write_tiny_checkpoint(tmp_path))
    assert main(["quality", "--model", model, "--quantization", "int4", "--unround", "--num-tokens", "9"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("\t")[0] for line in lines[1:-1]] == ["float32, weights moved", "int4, weights moved"]
