"""Whether a beam search can run here at all."""

from scheduler.beam_search import num_blocks_at_most
from scheduler.errors import InvalidPromptError, InvalidSamplingParamsError, PromptTooLongError
from scheduler.sampling_params import SamplingParams
from scheduler.sequence import Sequence


def check_beams(seq: Sequence, max_num_seqs: int, num_blocks: int, block_size: int) -> None:
    """Raise what is wrong with a beam search that is to be taken on; its `max_num_tokens` are known.

    InvalidSamplingParamsError: more beams than sequences may run. PromptTooLongError: all its beams may come to hold
    more blocks than there are. InvalidPromptError: it has tokens of an earlier run, which beams rewrite.
    """
    if seq.num_generated_tokens > 0:
        raise InvalidPromptError(
            f"beam search {seq.seq_id} comes with {seq.num_generated_tokens} generated tokens, but beams rewrite their "
            "past: start it over"
        )
    reason = why_no_room(seq.sampling, seq.num_prompt_tokens, seq.max_num_tokens, max_num_seqs, num_blocks, block_size)
    if reason is not None:
        is_wide = seq.sampling.beam_width > max_num_seqs
        raise (InvalidSamplingParamsError if is_wide else PromptTooLongError)(reason)


def why_no_room(
    sampling: SamplingParams, num_prompt_tokens: int, max_num_tokens: int, max_num_seqs: int, num_blocks: int,
    block_size: int,
) -> str | None:  # fmt: skip
    """Why a search of up to `max_num_tokens` tokens, prompt included, has no room, and what to do; None: it has."""
    width = sampling.beam_width
    if not sampling.is_beam_search:
        return None
    if width > max_num_seqs:
        return (
            f"beam_width is {width}, but at most {max_num_seqs} sequences run at once: use fewer beams, or start the "
            f"worker with max_num_seqs {width}"
        )
    num_needed = num_blocks_at_most(num_prompt_tokens, max_num_tokens - 1, width, block_size)
    if num_needed > num_blocks:
        return (
            f"{width} beams of {num_prompt_tokens} prompt tokens and up to {max_num_tokens - num_prompt_tokens} more "
            f"may hold {num_needed} blocks of {block_size} tokens, but the KV cache has {num_blocks}: use fewer beams "
            "or a smaller max_tokens"
        )
    return None
