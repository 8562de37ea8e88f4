"""Sequences of one request: the same prompt, each with tokens of its own after it."""

from hashlib import blake2b
from typing import TYPE_CHECKING

from scheduler.errors import InvalidPromptError

if TYPE_CHECKING:
    from scheduler.sequence import Sequence


class Family:
    """Sequences with one prompt, which is computed once: the first that runs computes it, the others fork from it.

        first     WAITING ─► computes the prompt ─► generates …
        others    WAITING ···························└─► fork ─► generate …

    A fork shares the blocks of the prompt, and copies the last one before it writes to it. It is no bond: each is
    preempted, swapped, aborted and ended by itself. Whoever comes back to the device without its blocks forks again,
    from any member that holds the prompt; where none does, the first of them computes it again.
    """

    __slots__ = ("__weakref__", "members")

    def __init__(self) -> None:
        self.members: list[Sequence] = []

    def join(self, seq: "Sequence") -> None:
        """Take in a sequence that is new. Raises InvalidPromptError where its prompt is not that of the others."""
        if self.members:
            other, num_prompt = self.members[0], seq.num_prompt_tokens
            is_same = (
                num_prompt == other.num_prompt_tokens
                and seq.token_ids[:num_prompt] == other.token_ids[:num_prompt]
                and (seq.tenant, seq.adapter, seq.cache_salt) == (other.tenant, other.adapter, other.cache_salt)
                and seq.use_prefix_cache == other.use_prefix_cache
            )
            if not is_same:
                raise InvalidPromptError(
                    f"sequence {seq.seq_id} has another prompt than {other.seq_id}: only equal ones make a family"
                )
        self.members.append(seq)

    def leave(self, seq: "Sequence") -> None:
        """Let go of one that has ended."""
        self.members.remove(seq)

    def source(self, seq: "Sequence") -> "Sequence | None":
        """Another member whose blocks hold the whole prompt, computed."""
        for member in self.members:
            if member is not seq and member.num_computed_tokens >= member.num_prompt_tokens:
                return member
        return None

    def is_awaited_by(self, seq: "Sequence") -> bool:
        """Whether `seq` should wait, since another member is computing the prompt right now and none has it yet."""
        if seq.num_swapped_tokens > 0 or self.source(seq) is not None:
            return False
        return any(member.has_row and member.num_computed_tokens < member.num_prompt_tokens for member in self.members)


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of a request with this seed: choice 0 draws what the request alone would draw.

    A pure function, the same in every process: 64 bits, signed.
    """
    if index == 0:
        return seed
    digest = blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
