"""Prefixes that lie in the CPU tier: copied to the device instead of being computed again."""

from scheduler.block_pool import Block
from scheduler.config import PreemptionMode, SchedulerConfig
from scheduler.kv_cache_manager import KVCacheManager
from scheduler.sequence import Sequence


class TierHits:
    """Decides whether a sequence that is admitted begins with blocks of the CPU tier.

        known tokens   [ on the device | in the CPU tier |  nowhere  ]
                         taken at once    copied in         computed when the copies have ended

    Copying a block costs as much for everybody, and so does computing it. So the choice is made once, by the rates by
    which `auto` chooses for a victim; as long as one of them is not known, blocks are copied. The mode `recompute`
    leaves the tier alone.
    """

    def __init__(self, kv: KVCacheManager, config: SchedulerConfig, kv_block_bytes: int) -> None:
        self._kv = kv
        self._is_worth_it = kv.swap is not None and _is_copy_cheaper(config, kv_block_bytes, kv.block_size)

    def try_begin(self, seq: Sequence, hit: list[Block]) -> bool:
        """Begin to copy what the CPU tier holds of `seq` beyond `hit`, which the device holds.

        SWAPPING_IN afterwards; False, and nothing changed, where there is nothing beyond. The caller has made sure
        that there are blocks for all tokens of `seq`.
        """
        return self._is_worth_it and self._kv.try_begin_tier_hit(seq, hit)


def _is_copy_cheaper(config: SchedulerConfig, kv_block_bytes: int, block_size: int) -> bool:
    if config.preemption_mode is not PreemptionMode.AUTO:
        return config.preemption_mode is PreemptionMode.SWAP
    if config.swap_bytes_per_s is None or config.prefill_tokens_per_s is None:
        return True
    return kv_block_bytes / config.swap_bytes_per_s <= block_size / config.prefill_tokens_per_s
