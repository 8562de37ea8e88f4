"""The start-up profile: what the largest step takes."""

from pathlib import Path

import pytest
import torch

from model.activations import measure_activations
from model.decoder import Decoder
from model.errors import StepTooLargeError
from model.layers import ForwardContext
from model.model_runner import RunnerConfig
from model.weights import random_weights
from tests.unit.model_runner.driver import tiny_config

CONFIG = tiny_config(num_layers=4)
LIMITS = RunnerConfig(max_num_seqs=24, max_model_len=100, num_threads=1)


class WatchedDecoder(Decoder):
    """Keeps the shapes that a forward pass was asked for; may run out of memory."""

    error: BaseException | None = None
    seen: list[tuple[int, int, int, int]]

    def hidden(
        self, input_ids: torch.Tensor, context: ForwardContext, logits_rows: torch.Tensor | None
    ) -> torch.Tensor:
        """As the decoder's own."""
        num_rows = len(input_ids) if logits_rows is None else len(logits_rows)
        self.seen.append((len(input_ids), num_rows, len(self.layers), int(context.meta.context_lens.max())))
        if self.error is not None:
            raise self.error
        return super().hidden(input_ids, context, logits_rows)


def make_decoder() -> WatchedDecoder:
    decoder = WatchedDecoder(CONFIG, random_weights(CONFIG), max_positions=128)
    decoder.seen = []
    return decoder


@pytest.mark.parametrize("max_tokens", [8, 24, 90, 300])
def test_the_profile_computes_the_largest_batch_with_the_most_rows_on_two_layers(max_tokens: int) -> None:
    decoder = make_decoder()
    measure_activations(decoder, LIMITS, 16, max_tokens)
    context = min(100, max_tokens) if max_tokens > 24 else 1
    assert decoder.seen == [(max_tokens, min(max_tokens, 24), 2, context)]
    assert len(decoder.layers) == CONFIG.num_layers


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells the peak of its memory")
def test_the_profile_tells_about_what_the_widest_activations_take() -> None:
    """512 tokens of gate and up, 65,536 numbers each, and their product."""
    limits = RunnerConfig(max_num_seqs=4, max_model_len=2048, num_threads=1)
    config = tiny_config(intermediate_size=65_536)
    measured = measure_activations(Decoder(config, random_weights(config)), limits, 16, 512)
    widest = 512 * 3 * config.intermediate_size * 4
    assert measured is not None
    assert 0.5 * widest < measured < 2 * widest


def test_a_step_that_does_not_fit_at_all_is_refused_with_what_to_lower() -> None:
    decoder = make_decoder()
    decoder.error = MemoryError()
    with pytest.raises(StepTooLargeError, match=r"a step of 90 tokens .*: lower max_num_batched_tokens"):
        measure_activations(decoder, LIMITS, 16, 90)
