"""A KV cache in 8 bits: what it takes, what it is computed with, where it is refused, and that nothing is lost."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from kernels.attention_inputs import FP8
from kernels.dispatch import implementation
from model.errors import CorruptCheckpointError, UnsupportedCacheError
from model.kv_cache import KVCache
from model.kv_cache_dtype import pick_kv_dtype
from model.swap_copies import SwapCopies
from model.weights import check_weights, random_weights
from scheduler.output import BlockCopy, Transfer, TransferResult
from scheduler.sampling_params import SamplingParams
from tests.golden.swapped_runs import run_swapped
from tests.golden.tiny_llama import build, weights_of
from tests.kernel.triton_attention import needs_triton
from tests.tiny_checkpoint import write_tiny_checkpoint
from tests.unit.model_runner.driver import Driver, random_prompt, tiny_config
from worker.engine_builder import build_engine
from worker.engine_config import EngineConfig
from worker.engine_settings import engine_config
from worker.errors import StartupError
from worker.llm import LLM
from worker.settings import Settings

SEED = 5
NUM_NEW_TOKENS = 24


def make_config(folder: Path, **changes: Any) -> EngineConfig:
    settings: dict[str, Any] = {"max_model_len": 256, "num_kv_blocks": 60, "max_num_seqs": 8, "num_threads": 1}
    return EngineConfig(str(write_tiny_checkpoint(folder)), **settings | {"kv_cache_dtype": "fp8_e4m3"} | changes)


def prompts(count: int, longest: int = 60) -> dict[str, list[int]]:
    rng = random.Random(SEED)
    return {f"s{n}": [rng.randrange(256) for _ in range(rng.randint(1, longest))] for n in range(count)}


@pytest.mark.parametrize(("dtype", "share"), [("float32", 4), ("bfloat16", 2)])
def test_a_block_takes_a_quarter_or_half_of_the_bytes_and_the_engine_says_so(
    tmp_path: Path, dtype: str, share: int
) -> None:
    info = build_engine(make_config(tmp_path, dtype=dtype))[1]
    plain = build_engine(make_config(tmp_path, dtype=dtype, kv_cache_dtype="auto"))[1]
    assert info.kv_bytes_per_block * share == plain.kv_bytes_per_block
    assert (info.dtype, info.kv_cache_dtype, plain.kv_cache_dtype) == (dtype, "float8_e4m3fn", dtype)


def test_as_many_more_blocks_fit_into_the_same_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.engine_sizes.CPU_KV_LIMIT_BYTES", 1 << 20)
    changes: dict[str, Any] = {"num_kv_blocks": None, "max_num_seqs": 64}
    info = build_engine(make_config(tmp_path, **changes))[1]
    plain = build_engine(make_config(tmp_path, kv_cache_dtype="auto", **changes))[1]
    assert info.num_blocks == 4 * plain.num_blocks


def test_the_fingerprint_is_another_one_and_promises_nothing_of_batches(tmp_path: Path) -> None:
    """Another cache is other numbers: whoever continues a reply elsewhere must see it."""
    info = build_engine(make_config(tmp_path))[1]
    assert "/float32-kv-fp8_e4m3/cpu/" in info.fingerprint
    assert not info.fingerprint.endswith("/deterministic")
    assert "-kv-" not in build_engine(make_config(tmp_path, kv_cache_dtype="auto"))[1].fingerprint
    with pytest.raises(StartupError, match=r"deterministic can't be kept: .* use --kv-cache-dtype auto"):
        build_engine(make_config(tmp_path, deterministic=True))


def test_the_setting_reaches_the_engine() -> None:
    assert engine_config(Settings(), Path("m")).kv_cache_dtype == "auto"
    assert engine_config(Settings(kv_cache_dtype="fp8_e4m3"), Path("m")).kv_cache_dtype == "fp8_e4m3"


def test_an_unknown_name_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="kv_cache_dtype is int8: use auto or fp8_e4m3"):
        build_engine(make_config(tmp_path, kv_cache_dtype="int8"))


def test_a_device_without_such_numbers_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same check as every call's; torch's operators do it anywhere."""
    cuda = torch.device("cuda")
    monkeypatch.setattr("kernels.cache_dtype.takes_triton", lambda kernel, device: True)
    monkeypatch.setattr("kernels.cache_dtype.capability_of_cuda", lambda device: 80)
    with pytest.raises(UnsupportedCacheError, match=r"kv_cache_dtype is fp8_e4m3: .* 8\.9 or newer, and cuda has 8\.0"):
        pick_kv_dtype("fp8_e4m3", torch.bfloat16, cuda)
    assert pick_kv_dtype("auto", torch.bfloat16, cuda) is torch.bfloat16
    monkeypatch.setattr("kernels.cache_dtype.capability_of_cuda", lambda device: 89)
    assert pick_kv_dtype("fp8_e4m3", torch.bfloat16, cuda) is FP8


def test_swapped_sequences_give_the_tokens_of_those_that_stay(tmp_path: Path) -> None:
    """A block goes out and comes back with its bytes; its checksum is of those."""
    folder = write_tiny_checkpoint(tmp_path)
    made = prompts(5)
    greedy = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    options: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3", "enable_prefix_caching": False, "num_threads": 1}
    with LLM(str(folder), num_kv_blocks=200, **options) as llm:
        expected = [list(completion.token_ids) for completion in llm.generate(list(made.values()), greedy)]
    run = run_swapped(str(folder), made, NUM_NEW_TOKENS, num_kv_blocks=26, num_swap_blocks=100, **options)
    run.check()
    assert list(run.ids.values()) == expected


def test_a_cached_prefix_and_shared_blocks_give_the_same_tokens(tmp_path: Path) -> None:
    """Three replies share the blocks of their prompt; beams share those of their replies, and copy to write."""
    prompt = random_prompt(45, 256, random.Random(SEED))
    ways = {
        "three": SamplingParams(temperature=1.0, n=3, seed=7, max_tokens=NUM_NEW_TOKENS, ignore_eos=True),
        "beams": SamplingParams(n=3, beam_width=3, max_tokens=NUM_NEW_TOKENS, ignore_eos=True),
    }
    folder = write_tiny_checkpoint(tmp_path)
    with LLM(str(folder), check_invariants="step", num_kv_blocks=100, kv_cache_dtype="fp8_e4m3", num_threads=1) as llm:
        for name, params in ways.items():
            first, again = (llm.generate([prompt], params)[0] for _ in range(2))
            assert len({choice.token_ids for choice in first.choices}) == 3, name
            assert [choice.token_ids for choice in again.choices] == [choice.token_ids for choice in first.choices]
            assert again.stats is not None
            assert again.stats.num_cached_tokens >= 32, name


def of_every_byte(num_cpu_blocks: int) -> KVCache:
    """Blocks in which every byte stands, those of NaN, too."""
    cache = KVCache(
        tiny_config(), num_blocks=8, block_size=8, dtype=FP8, device=torch.device("cpu"), num_cpu_blocks=num_cpu_blocks
    )
    as_bytes(cache.blocks).copy_(
        torch.randint(0, 256, cache.blocks.shape, generator=torch.Generator().manual_seed(SEED))
    )
    return cache


def as_bytes(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.view(torch.uint8)


def test_blocks_are_copied_swapped_and_brought_back_byte_for_byte() -> None:
    cache = of_every_byte(num_cpu_blocks=4)
    before = as_bytes(cache.blocks).clone()
    cache.copy([BlockCopy(2, 6), BlockCopy(3, 7)])
    assert torch.equal(as_bytes(cache.blocks)[[6, 7]], before[[2, 3]])
    cache.begin_transfers([Transfer(1, (BlockCopy(4, 0), BlockCopy(1, 2)))], [])
    as_bytes(cache.blocks)[[4, 1]] = 0
    cache.begin_transfers([], [Transfer(2, (BlockCopy(0, 1), BlockCopy(2, 5)))])
    assert cache.ended_transfers() == (TransferResult(1), TransferResult(2))
    assert torch.equal(as_bytes(cache.blocks)[[1, 5]], before[[4, 1]])


@pytest.mark.parametrize("is_staging", [False, True])
def test_a_single_wrong_bit_in_the_cpu_tier_is_found_and_named(is_staging: bool) -> None:
    cache = of_every_byte(num_cpu_blocks=4)
    assert cache.cpu_tier is not None
    copies = SwapCopies(cache.blocks, cache.cpu_tier, is_staging=is_staging)
    copies.begin([Transfer(1, (BlockCopy(3, 0), BlockCopy(1, 1), BlockCopy(7, 2)))], [])
    as_bytes(cache.cpu_tier.blocks(1, 1)).view(-1)[77] ^= 1
    copies.begin([], [Transfer(2, (BlockCopy(0, 4), BlockCopy(1, 5), BlockCopy(2, 6)))])
    assert copies.ended(is_waiting=False) == (TransferResult(1), TransferResult(2, (5,)))
    assert torch.equal(as_bytes(cache.blocks)[[4, 6]], as_bytes(cache.blocks)[[3, 7]])


SCALES = {"k": 0.25, "v": 3.0}


@pytest.mark.parametrize("names", [("self_attn.k_scale", "self_attn.v_scale"), ("self_attn.k_proj.k_scale",)])
def test_a_checkpoint_s_scales_are_those_of_its_layers(names: tuple[str, ...]) -> None:
    """Layers without one have 1, and so has a cache in the model's own dtype."""
    config = tiny_config()
    weights = random_weights(config)
    for name in names:
        weights[f"model.layers.1.{name}"] = torch.tensor([SCALES[name[-7]]])
    check_weights(config, weights)
    options = [layer.attention.options for layer in Driver(config, weights, kv_dtype=FP8).decoder.layers]
    assert (options[0].k_scale, options[0].v_scale) == (1.0, 1.0)
    assert (options[1].k_scale, options[1].v_scale) == (0.25, 3.0 if len(names) == 2 else 1.0)
    assert all(layer.attention.options.is_plain for layer in Driver(config, weights).decoder.layers)


@pytest.mark.parametrize("scale", [[0.0], [-1.0], [torch.nan], [1.0, 2.0]])
def test_a_scale_that_can_not_be_is_named(scale: list[float]) -> None:
    config = tiny_config()
    weights = random_weights(config) | {"model.layers.0.self_attn.v_scale": torch.tensor(scale)}
    with pytest.raises(CorruptCheckpointError, match=r"layers\.0\.self_attn\.v_scale is .* one number above 0"):
        Driver(config, weights, kv_dtype=FP8)


@needs_triton
@pytest.mark.parametrize(
    ("kv_dtype", "choice"), [(None, "attention=triton,rope_and_write=triton"), (FP8, "attention=triton")]
)
def test_triton_s_kernels_give_the_logits_of_torch_s_operators(kv_dtype: torch.dtype | None, choice: str) -> None:
    """With windows that the text outgrows, and with scales. The interpreter rounds to FP8 wrongly: torch writes it."""
    config = tiny_config(windows=(None, 9))
    weights = random_weights(config) | {"model.layers.1.self_attn.k_scale": torch.tensor(0.5)}
    logits = []
    for kernels in ("torch", choice):
        with implementation(kernels):
            driver = Driver(config, weights, kv_dtype=kv_dtype)
            sequences = [driver.add(f"s{n}", random_prompt(n, config.vocab_size, random.Random(n))) for n in (3, 17)]
            driver.decode(2)
        logits.append(torch.cat([torch.stack(sequence.logits) for sequence in sequences]))
    assert float((logits[0] - logits[1]).abs().max()) < 1e-4


def test_the_logits_are_those_of_a_model_whose_keys_and_values_are_rounded() -> None:
    """Of transformers, in its own attention, with scales; far closer than to those that aren't rounded."""
    oracle, config = build(num_heads=4, num_kv_heads=2)
    weights = weights_of(oracle)
    for layer in range(3):
        weights[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor(0.02)
        weights[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor(0.01)
    driver = Driver(config, weights, kv_dtype=FP8)
    rng = random.Random(SEED)
    sequences = [driver.add(f"s{n}", random_prompt(n, config.vocab_size, rng)) for n in (3, 17, 60)]
    driver.decode_raggedly(8, rng)

    def rounded_attention(module: Any, query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> Any:
        key, value = ((x / scale).to(FP8).float() * scale for x, scale in ((key, 0.02), (value, 0.01)))
        return eager_attention_forward(module, query, key, value, *rest, **more)

    AttentionInterface.register("eager_fp8_cache", rounded_attention)
    AttentionMaskInterface.register("eager_fp8_cache", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    for sequence in sequences:
        errors = []
        for attention in ("eager_fp8_cache", "eager"):
            oracle.set_attn_implementation(attention)
            with torch.inference_mode():
                expected = oracle(torch.tensor([sequence.token_ids])).logits[0, sequence.num_prompt_tokens - 1 : -1]
            errors.append(float((torch.stack(sequence.logits) - expected).abs().mean()))
        # What is as near to one step as to the next may be rounded to either.
        assert errors[0] < 0.02 * errors[1], errors
