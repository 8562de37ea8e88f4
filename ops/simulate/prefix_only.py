"""The prefix cache alone, without time: each prompt in order of arrival, computed at once and let go at once."""

from collections import OrderedDict
from dataclasses import dataclass

from ops.simulate.errors import SimulateError
from ops.simulate.traces import Trace
from scheduler.config import CacheConfig
from scheduler.kv_cache_manager import KVCacheManager
from scheduler.sampling_params import SamplingParams
from scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PrefixRun:
    """A pass over the trace. Blocks are prompt blocks; `num_blocks` is the room that there was for them."""

    num_blocks: int
    num_prompt_blocks: int
    num_hit_blocks: int

    @property
    def hit_share(self) -> float:
        """Prompt blocks found, of all."""
        return self.num_hit_blocks / self.num_prompt_blocks


def check_has_hashes(trace: Trace) -> None:
    """Raises SimulateError where no request says what its prompt shares with others."""
    if not any(request.hash_ids for request in trace.requests):
        raise SimulateError(f"this trace ({trace.kind}) has no hash_ids: without them no prompt begins like another")


def run_cache(trace: Trace, num_blocks: int, block_size: int) -> PrefixRun:
    """The real KV cache manager with `num_blocks` blocks. A prompt that is larger than that finds nothing.

    Each hash id counts as a whole block, as those who count ids do, and one token follows the prompt, since a lookup
    leaves the last one to be computed.
    """
    kv = KVCacheManager(CacheConfig(num_blocks, block_size))
    sampling = SamplingParams(max_tokens=1)
    num_prompt_blocks = num_hit_blocks = 0
    for request in trace.requests:
        tokens = trace.hash_tokens(request)
        num_full = len(tokens) // block_size
        tokens.append(request.own_token)
        seq = Sequence(f"r{request.index}", tokens, sampling, tenant=request.tenant)
        num_prompt_blocks += num_full
        hit = kv.find_prefix(seq)
        kv.take_prefix(seq, hit)
        if kv.allocate_slots(seq, num_full * block_size - seq.num_computed_tokens) is not None:
            num_hit_blocks += len(hit)
            seq.num_computed_tokens = num_full * block_size
            kv.seal_full_blocks(seq)
        kv.free(seq)
    return PrefixRun(num_blocks, num_prompt_blocks, num_hit_blocks)


def run_plain_lru(trace: Trace, num_hashes: int) -> PrefixRun:
    """What to compare with: the last `num_hashes` hash ids that were used, each by itself."""
    recent: OrderedDict[tuple[str, int], None] = OrderedDict()
    num_prompt_blocks = num_hit_blocks = 0
    for request in trace.requests:
        num_prompt_blocks += len(request.hash_ids)
        for hash_id in request.hash_ids:
            key = (request.tenant, hash_id)
            if key in recent:
                num_hit_blocks += 1
                recent.move_to_end(key)
                continue
            recent[key] = None
            if len(recent) > num_hashes:
                recent.popitem(last=False)
    return PrefixRun(num_hashes, num_prompt_blocks, num_hit_blocks)
