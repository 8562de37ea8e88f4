"""What beams that share blocks hold together."""

from collections.abc import Iterable, Iterator

from scheduler.sequence import Sequence


def num_held_blocks(beams: Iterable[Sequence]) -> int:
    """Device blocks that these beams hold; a shared one counts once."""
    return len({block.block_id for beam in beams for block in beam.block_table})


def num_empty_slots(beams: Iterable[Sequence], block_size: int) -> int:
    """Slots of the blocks that these beams hold, each counted once, in which no beam has a computed token."""
    filled: dict[int, int] = {}
    for beam in beams:
        for index, block in enumerate(beam.block_table):
            num_filled = min(block_size, max(0, beam.num_computed_tokens - index * block_size))
            filled[block.block_id] = max(filled.get(block.block_id, 0), num_filled)
    return sum([block_size - num_filled for num_filled in filled.values()])


def each_beam(seqs: Iterable[Sequence]) -> Iterator[Sequence]:
    """These sequences, and the other beams of those that have any."""
    for seq in seqs:
        yield from seq.all_beams
