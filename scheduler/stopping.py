"""Where a sequence ends."""

from scheduler.output import FinishReason
from scheduler.sampling_params import SamplingParams
from scheduler.sequence import Sequence


def finish_reason(seq: Sequence, eos_token_ids: frozenset[int]) -> FinishReason | None:
    """Why `seq` ends with the last token it has; None if it goes on.

    The model's own end comes first, then the ids that the request names, then the limit (`max_tokens`, or
    the context's end), so that a text which ends by itself in its last token is not called cut off.
    """
    if seq.num_generated_tokens == 0:
        return None
    token_id = seq.token_ids[-1]
    sampling = seq.sampling
    if token_id in eos_token_ids and not sampling.ignore_eos:
        return FinishReason.EOS
    if token_id in sampling.stop_token_ids:
        return FinishReason.STOP
    if len(seq.token_ids) >= seq.max_num_tokens:
        return FinishReason.LENGTH
    return None


def end_tokens(sampling: SamplingParams, eos_token_ids: frozenset[int]) -> dict[int, FinishReason]:
    """The tokens that end a reply of such a request, and why: those by which `finish_reason` goes."""
    ends = dict.fromkeys(sampling.stop_token_ids, FinishReason.STOP)
    return ends if sampling.ignore_eos else ends | dict.fromkeys(eos_token_ids, FinishReason.EOS)
