"""The CPU tier: its blocks, what they hold, and the copies that are on their way between the tiers."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count

from scheduler.block_pool import Block, BlockContent, BlockPool
from scheduler.copy_queue import CopyQueue
from scheduler.output import BlockCopy, Transfer, TransferResult
from scheduler.prefix_cache import PrefixCache
from scheduler.sequence import Sequence, SequenceStatus

# A sequence that is written behind is looked up from its beginning once for so many blocks.
BLOCKS_PER_FIND = 4


@dataclass(slots=True, eq=False)
class Flight:
    """A transfer on its way: `device[i]` and `cpu[i]` are the two sides of one copy, each held by a reference.

    `waiting` are the sequences that can't go on before it has ended.
    """

    is_out: bool
    device: list[Block]
    cpu: list[Block]
    waiting: list[Sequence] = field(default_factory=list)


class SwapTier:
    """Owner of the CPU pool and of the transfers. Only KVCacheManager calls it.

                    begin_out                                     end
        device block ─────────► held by the flight ───────────────────────► free, with its cached content
        CPU block    ─────────► held by the flight and by the sequence ───► held by the sequence

                    begin_in                                      end
        CPU block    ─────────► held by the flight and by the sequence ───► free, with its cached content
        device block ─────────► held by the flight and by the sequence ───► held by the sequence

    A flight holds both sides by references of its own until the runner reports its end. So neither side is handed
    out while a copy may still read or write it, and an abort needs no bookkeeping: what the sequence lets go of, the
    flight still holds.

    Full blocks are entered into `index` under their content, like those of the device, and keep it until they are
    handed out again. A block that lies here already, because a sequence that shares it, or the same one earlier, was
    swapped out, or because it was written behind, is not copied again.

    A step begins to copy at most `step_blocks` blocks each way (0: any number). What is more is cut into transfers of
    that size, which are flights from the start: their blocks are held while they wait for their step. A sequence's tail
    leaves first, so that its head, which others are likelier to need, is handed out last.
    """

    def __init__(
        self, num_blocks: int, device: BlockPool, index: PrefixCache | None, block_bytes: int, step_blocks: int = 0
    ) -> None:
        self.index = index
        self.pool = BlockPool(num_blocks, (lambda content: None) if index is None else index.evict)
        self.flights: dict[int, Flight] = {}
        self.num_sequences = 0
        self.num_out_blocks = 0
        self.num_in_blocks = 0
        self.num_damaged_blocks = 0
        self.num_written_behind_blocks = 0
        self._device = device
        self._block_bytes = block_bytes
        self._step_blocks = step_blocks
        self._outs = CopyQueue(step_blocks)
        self._ins = CopyQueue(step_blocks)
        # CPU block id -> the transfer that still writes it.
        self._filling: dict[int, int] = {}
        self._ids = count(1)
        # Copies of this step that are to be written behind: the two sides, each block held.
        self._behind_device: list[Block] = []
        self._behind_cpu: list[Block] = []

    @property
    def num_leaving_blocks(self) -> int:
        """Device blocks that nothing but a flight holds: they are free as soon as it ends."""
        if not self.flights:
            return 0
        held = Counter(block for flight in self.flights.values() for block in flight.device)
        return sum([block.ref_cnt == num_refs for block, num_refs in held.items()])

    @property
    def num_queued_blocks(self) -> int:
        """Blocks, both ways, that the next `take_transfers` will begin to copy, or a later one."""
        return self._outs.num_blocks + self._ins.num_blocks

    @property
    def is_link_idle(self) -> bool:
        """Whether no copy that was begun is still on its way."""
        return len(self.flights) == len(self._outs) + len(self._ins)

    def num_blocks_to_copy(self, seq: Sequence, block_size: int) -> int:
        """Blocks that swapping `seq`, with all its beams, would copy out."""
        kept = self._kept(seq, block_size)
        return len({block for beam in seq.all_beams for block in beam.block_table if block not in kept})

    def num_blocks_to_copy_in(self, seq: Sequence) -> int:
        """CPU blocks of swapped `seq`, with all its beams, in whose place no table has a block yet."""
        return len(self._sources_in(seq))

    def try_begin_out(self, seq: Sequence, block_size: int) -> bool:
        """Begin to move the blocks of `seq`, which runs, and of all its beams; False if there is no room.

        It is SWAPPING_OUT afterwards, or SWAPPED where nothing is to be copied. What beams share is copied once.
        """
        beams, kept = seq.all_beams, self._kept(seq, block_size)
        tables = [beam.block_table.clear() for beam in beams]
        moving = list(dict.fromkeys(block for table in tables for block in table if block not in kept))
        held = [kept[block] for table in tables for block in table if block in kept]
        self.pool.touch(held)
        new = self.pool.allocate(len(moving))
        if new is None:
            self.pool.free(reversed(held))
            for beam, table in zip(beams, tables, strict=True):
                beam.block_table.append(table)
            return False
        partners = kept | dict(zip(moving, _paired(moving, new), strict=True))
        # What moves is held by the flight from now on.
        self._device.touch(moving)
        self.num_sequences += 1
        seq.status = SequenceStatus.SWAPPED
        awaited = {self._filling[block.block_id] for block in held if block.block_id in self._filling}
        if moving:
            awaited.update(self._begin(True, moving, [partners[block] for block in moving]))
            self.num_out_blocks += len(moving)
            seq.swapped_bytes += len(moving) * self._block_bytes
        for beam, table in zip(beams, tables, strict=True):
            num_kept = sum([block in kept for block in table])
            beam.cpu_table.append([partners[block] for block in table])
            self.pool.touch([partners[block] for block in table if block not in kept])
            num_full = beam.num_computed_tokens // block_size
            self._enter(beam, beam.cpu_table.head(num_kept), beam.cpu_table.tail(num_kept)[: num_full - num_kept])
            self._device.free(reversed(table))
        self.pool.free(reversed(new))
        for transfer_id in sorted(awaited):
            self._wait(seq, transfer_id, SequenceStatus.SWAPPING_OUT)
        return True

    def _kept(self, seq: Sequence, block_size: int) -> dict[Block, Block]:
        """The blocks of `seq` and all its beams that lie here already, and where: of each the first ones."""
        kept: dict[Block, Block] = {}
        for beam in seq.all_beams:
            kept.update(zip(beam.block_table, self._find(beam, beam.num_computed_tokens // block_size), strict=False))
        return kept

    def write_behind(self, seq: Sequence, num_full: int, max_blocks: int) -> int:
        """Note to copy what the first `num_full` blocks of `seq`, which are full, lack here; the number of copies.

        They begin with the next `begin_write_behind`, which has to come in the same step.
        `seq` keeps its blocks and runs on: nobody writes to a full block. The copies belong to nobody when their
        transfer has ended; they are found by what they hold, until they are handed out again.
        """
        start, kept = self._find_written(seq, num_full)
        self.pool.touch(kept)
        count = max(0, min(num_full - start, max_blocks, self.pool.num_free))
        seq.num_written_blocks = start + count
        seq.written_content = kept[-1].content if kept else None
        if count > 0:
            new = self.pool.allocate(count)
            assert new is not None, f"{count} of {self.pool.num_free} free CPU blocks can't be had"
            moving = seq.block_table.blocks[start : start + count]
            self._device.touch(moving)
            targets = _paired(moving, new)
            self._behind_device += moving
            self._behind_cpu += targets
            name = None if seq.written_content is None else seq.written_content.name
            seq.written_content = self._enter_from(seq, start, name, targets)
            self.num_written_behind_blocks += count
        self.pool.free(reversed(kept))
        return count

    def _find_written(self, seq: Sequence, num_full: int) -> tuple[int, list[Block]]:
        """How many of the first `num_full` blocks of `seq` lie here already, and those that writing on must not lose.

        That is the last of them, where it is known from the time before. Now and then it is all of them, found anew:
        in the order in which free blocks are handed out they are the last then.
        """
        start = seq.num_written_blocks
        if start // BLOCKS_PER_FIND == num_full // BLOCKS_PER_FIND and seq.written_content is not None:
            last = None if self.index is None else self.index.holder(seq.written_content)
            if last is not None:
                return start, [last]
        kept = self._find(seq, num_full)
        return len(kept), kept

    def begin_write_behind(self) -> None:
        """Begin what `write_behind` has noted, whosever it is, as one transfer: each costs more than a block of it."""
        if not self._behind_cpu:
            return
        device, cpu = self._behind_device, self._behind_cpu
        self._behind_device, self._behind_cpu = [], []
        self._begin(True, device, cpu)
        self.pool.free(reversed(cpu))

    def find_prefix(self, seq: Sequence) -> list[Block]:
        """The longest run of blocks that `seq` begins with, all of which have been copied here."""
        found = self.index.find(seq) if self.index is not None and seq.use_prefix_cache else []
        num_ready = next((i for i, block in enumerate(found) if block.block_id in self._filling), len(found))
        return found[:num_ready]

    def lacks(self, seq: Sequence, index: int) -> bool:
        """Whether a look at the notes of `seq` shows that its block `index` is not found here."""
        return self.index is None or self.index.lacks(seq, index)

    def adopt(self, seq: Sequence, blocks: list[Block]) -> None:
        """Let waiting `seq` hold `blocks`, which `find_prefix` has found, as if it had been swapped."""
        self.pool.touch(blocks)
        seq.cpu_table.append(blocks)
        self.num_sequences += 1

    def begin_in(self, seq: Sequence, blocks: list[Block]) -> None:
        """Begin to copy what the tables of swapped `seq` and its beams lack into `blocks`, which nobody holds yet.

        They have one reference each, which is the flight's from now on. It is SWAPPING_IN afterwards. There are as many
        as `num_blocks_to_copy_in` says.
        """
        sources = self._sources_in(seq)
        targets = _paired(sources, blocks)
        partners = dict(zip(sources, targets, strict=True))
        for beam in seq.all_beams:
            missing = [partners[block] for block in beam.cpu_table.tail(len(beam.block_table))]
            beam.block_table.append(missing)
            self._device.touch(missing)
        self.num_in_blocks += len(sources)
        seq.swapped_bytes += len(sources) * self._block_bytes
        for transfer_id in self._begin(False, targets, sources):
            self._wait(seq, transfer_id, SequenceStatus.SWAPPING_IN)

    @staticmethod
    def _sources_in(seq: Sequence) -> list[Block]:
        """The CPU blocks, each once, in whose place the tables of `seq` and its beams have no block yet."""
        missing = (block for beam in seq.all_beams for block in beam.cpu_table.tail(len(beam.block_table)))
        return list(dict.fromkeys(missing))

    def take_transfers(self) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
        """What this step begins to copy: out, in."""
        return self._outs.take(), self._ins.take()

    def end(self, result: TransferResult) -> list[Sequence]:
        """Let go of both sides; the sequences that wait for nothing more, `is_damaged` where a copy has failed."""
        flight = self.flights.pop(result.transfer_id)
        failed = set(result.failed_dst)
        for block in flight.cpu if flight.is_out else ():
            del self._filling[block.block_id]
        targets = flight.cpu if flight.is_out else flight.device
        bad = [cpu for cpu, target in zip(flight.cpu, targets, strict=True) if target.block_id in failed]
        self._forget(bad)
        if not flight.is_out:
            self.num_damaged_blocks += len(bad)
        self._device.free(reversed(flight.device))
        self.pool.free(reversed(flight.cpu))
        ready = []
        for seq in flight.waiting:
            seq.num_transfers -= 1
            is_bad = any(block in bad for beam in seq.all_beams for block in beam.cpu_table)
            seq.is_damaged = seq.is_damaged or is_bad
            if seq.num_transfers == 0 and not seq.is_finished:
                ready.append(seq)
        return ready

    def free(self, seq: Sequence) -> None:
        """Take the CPU blocks of `seq` back; what they hold stays known until they are handed out again."""
        blocks = seq.cpu_table.clear()
        self.num_sequences -= bool(blocks) and seq.head is seq
        self.pool.free(reversed(blocks))
        seq.num_swapped_tokens = 0
        seq.is_damaged = False

    def forget(self, seq: Sequence, num_full: int) -> None:
        """Forget what is known of the first `num_full` blocks of `seq`: their numbers can't be trusted."""
        self._forget(self._find(seq, num_full))

    def _find(self, seq: Sequence, num_full: int) -> list[Block]:
        return self.index.find(seq, num_full) if self.index is not None and seq.use_prefix_cache else []

    def _begin(self, is_out: bool, device: list[Block], cpu: list[Block]) -> list[int]:
        """Queue the copies, cut where they are more than a step may begin, the tail first; ids of the transfers."""
        size = self._step_blocks or len(device)
        pieces = [slice(max(0, end - size), end) for end in range(len(device), 0, -size)]
        return [self._begin_piece(is_out, device[piece], cpu[piece]) for piece in pieces]

    def _begin_piece(self, is_out: bool, device: list[Block], cpu: list[Block]) -> int:
        self.pool.touch(cpu)
        transfer_id = next(self._ids)
        self.flights[transfer_id] = Flight(is_out, device, cpu)
        if is_out:
            self._filling.update({block.block_id: transfer_id for block in cpu})
        pairs = zip(device, cpu, strict=True) if is_out else zip(cpu, device, strict=True)
        copies = sorted([(source.block_id, target.block_id) for source, target in pairs])
        transfer = Transfer(transfer_id, tuple([BlockCopy(src, dst) for src, dst in copies]))
        (self._outs if is_out else self._ins).add(transfer)
        return transfer_id

    def _wait(self, seq: Sequence, transfer_id: int, status: SequenceStatus) -> None:
        self.flights[transfer_id].waiting.append(seq)
        seq.num_transfers += 1
        seq.status = status

    def _enter(self, seq: Sequence, kept: list[Block], blocks: list[Block]) -> None:
        """Enter `blocks`, which hold the full blocks of `seq` behind those in `kept`, into the index."""
        if self.index is None or not seq.use_prefix_cache:
            return
        if kept and kept[-1].content is None:
            # One of equal hash, which was entered for another beam just now, has taken its entry: enter all again.
            kept, blocks = [], [*kept, *blocks]
        name = None if not kept or kept[-1].content is None else kept[-1].content.name
        self._enter_from(seq, len(kept), name, blocks)

    def _enter_from(self, seq: Sequence, start: int, name: int | None, blocks: list[Block]) -> BlockContent | None:
        """Enter `blocks` as those of `seq` from `start` on, behind the content of this name; what the last one holds.

        None where another block holds the same already.
        """
        content: BlockContent | None = None
        if self.index is None:
            return None
        for index, block in enumerate(blocks, start=start):
            name, content, loser = self.index.enter(seq, index, name, block)
            if loser is not None:
                self.pool.drop_content(loser)
            if content is not None:
                self.pool.set_content(block, content)
        return content

    def _forget(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if block.content is not None and self.index is not None:
                self.index.evict(block.content)
                self.pool.drop_content(block)


def _paired(blocks: list[Block], partners: list[Block]) -> list[Block]:
    """`partners` in an order that goes with `blocks` by id, so that neighbours are copied to neighbours, in one piece.

    Free lists hand a sequence's blocks out in any order.
    """
    if len(partners) == 1:
        return partners
    ids = [block.block_id for block in partners]
    by_id = sorted(range(len(ids)), key=ids.__getitem__)
    ranks = sorted(range(len(blocks)), key=lambda index: blocks[index].block_id)
    paired = list(partners)
    for rank, index in zip(by_id, ranks, strict=True):
        paired[index] = partners[rank]
    return paired
