"""Copies of blocks between the device and the CPU tier: begun in one step, ended in the same or a later one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch

from kernels.block_copy import gather_blocks, scatter_blocks
from kernels.checksum import block_checksums
from model.copy_streams import CopyEvent, CopyStream, copy_stream
from model.cpu_tier import CpuTier
from scheduler.output import BlockCopy, Transfer, TransferResult

# Scattered blocks smaller than this are gathered on the device before they cross to the CPU, so that many of them are
# one copy. Larger ones keep the bus busy by themselves.
MIN_DIRECT_BYTES: Final = 512 << 10
# The most that is gathered at a time, hence what it takes of the device's memory in each direction.
MAX_STAGED_BYTES: Final = 16 << 20


def runs_of(
    copies: Sequence[BlockCopy], slab_blocks: int, *, is_out: bool, max_staged: int = 0
) -> list[tuple[list[int], int]]:
    """(device's blocks, first block of the CPU tier) of runs that are neighbours in one slab of the CPU tier.

    They are neighbours on the device, too, unless up to `max_staged` of them may be gathered.
    """
    runs: list[tuple[list[int], int]] = []
    for copy in copies:
        on_device, on_cpu = (copy.src, copy.dst) if is_out else (copy.dst, copy.src)
        if runs and on_cpu % slab_blocks:
            ids, first = runs[-1]
            fits = len(ids) < max_staged if max_staged else on_device == ids[-1] + 1
            if fits and on_cpu == first + len(ids):
                ids.append(on_device)
                continue
        runs.append(([on_device], on_cpu))
    return runs


@dataclass(slots=True, eq=False)
class _Pending:
    """A transfer that was begun. `checks` are pairs of n targets and a bool tensor [n]: which are damaged."""

    transfer_id: int
    event: CopyEvent
    failed: list[int] = field(default_factory=list)
    checks: list[tuple[list[int], torch.Tensor]] = field(default_factory=list)


class SwapCopies:
    """Does the copies of one KV cache, and keeps to these rules, each of which is somebody's corrupted memory:

    1. A copy to the CPU begins after the last step that wrote its blocks: its stream waits for the compute stream.
    2. A block is the scheduler's again only when `ended` has named its transfer, which is after the copy's event.
    3. A copy to the device is waited for by the compute stream, and polled, not waited for, by the host.
    4. Nothing here decides who owns a block: the scheduler holds both sides until `ended`.
    5. One device, so there is nobody else to wait for.
    6. Nothing is called off: who aborts a sequence waits for its copies.
    7. Pinned memory is taken once, in slabs, and only grows.
    8. Each block's checksum is taken on the device before it leaves, and compared on the device after it is back.

    On the CPU device a copy is made while `begin` is called. On CUDA it runs on a stream of its own for each
    direction, beside the step's computation. There scattered blocks that are small go through a staging buffer, in one
    copy; `is_staging` decides it for tests. `new_stream` makes the stream of a direction: the device's, or a double.
    """

    def __init__(
        self,
        device_blocks: torch.Tensor,
        tier: CpuTier,
        *,
        is_staging: bool | None = None,
        new_stream: Callable[[torch.device], CopyStream] = copy_stream,
    ) -> None:
        self._blocks = device_blocks
        self._tier = tier
        self._pending: list[_Pending] = []
        self._is_cuda = device_blocks.device.type == "cuda"
        block_bytes = device_blocks[:1].nbytes
        if is_staging is None:
            is_staging = self._is_cuda and block_bytes < MIN_DIRECT_BYTES
        self._max_staged = max(1, MAX_STAGED_BYTES // block_bytes) if is_staging else 0
        self._out_stream = new_stream(device_blocks.device)
        self._in_stream = new_stream(device_blocks.device)

    def begin(self, outs: Sequence[Transfer], ins: Sequence[Transfer]) -> None:
        """Begin to copy: to the CPU, and to the device."""
        for transfer in outs:
            self._begin_out(transfer)
        for transfer in ins:
            self._begin_in(transfer)

    def ended(self, *, is_waiting: bool) -> tuple[TransferResult, ...]:
        """Those that have ended since the last call. `is_waiting`: wait for the oldest, if there is one."""
        if is_waiting and self._pending:
            self._pending[0].event.synchronize()
        done = [pending for pending in self._pending if pending.event.query()]
        self._pending = [pending for pending in self._pending if pending not in done]
        return tuple(_result(pending) for pending in done)

    def _begin_out(self, transfer: Transfer) -> None:
        runs, failed = list[tuple[list[int], int]](), list[int]()
        for ids, dst in runs_of(transfer.copies, self._tier.slab_blocks, is_out=True, max_staged=self._max_staged):
            if self._tier.try_grow(dst):
                runs.append((ids, dst))
            else:
                failed += range(dst, dst + len(ids))
        self._out_stream.run(partial(self._copy_out, runs))
        self._pending.append(_Pending(transfer.transfer_id, self._out_stream.record(), failed))

    def _begin_in(self, transfer: Transfer) -> None:
        runs = runs_of(transfer.copies, self._tier.slab_blocks, is_out=False, max_staged=self._max_staged)
        checks = [(ids, torch.empty(len(ids), dtype=torch.bool, pin_memory=self._is_cuda)) for ids, _ in runs]
        self._in_stream.run(partial(self._copy_in, runs, [are_damaged for _, are_damaged in checks]))
        self._pending.append(_Pending(transfer.transfer_id, self._in_stream.record(), checks=checks))

    def _copy_out(self, runs: list[tuple[list[int], int]]) -> None:
        """On the stream of copies to the CPU."""
        tier = self._tier
        for ids, dst in runs:
            source, count = self._blocks[ids[0] : ids[0] + len(ids)], len(ids)
            if not _are_neighbours(ids):
                source = self._staging(count)
                gather_blocks(self._blocks, self._to_device(ids), source)
            tier.checksums[dst : dst + count].copy_(block_checksums(source), non_blocking=True)
            tier.blocks(dst, count).copy_(source, non_blocking=True)

    def _copy_in(self, runs: list[tuple[list[int], int]], are_damaged: list[torch.Tensor]) -> None:
        """On the stream of copies to the device."""
        for (ids, src), flags in zip(runs, are_damaged, strict=True):
            count, is_direct = len(ids), _are_neighbours(ids)
            target = self._blocks[ids[0] : ids[0] + count] if is_direct else self._staging(count)
            target.copy_(self._tier.blocks(src, count), non_blocking=True)
            expected = self._tier.checksums[src : src + count].to(target.device, non_blocking=True)
            flags.copy_(block_checksums(target) != expected, non_blocking=True)
            if not is_direct:
                scatter_blocks(target, self._to_device(ids), self._blocks)

    def _staging(self, count: int) -> torch.Tensor:
        """Of the current stream's memory, so that it isn't given to anything before that stream is through with it."""
        return torch.empty((count, *self._blocks.shape[1:]), dtype=self._blocks.dtype, device=self._blocks.device)

    def _to_device(self, ids: list[int]) -> torch.Tensor:
        return torch.tensor(ids, pin_memory=self._is_cuda).to(self._blocks.device, non_blocking=True)


def _result(pending: _Pending) -> TransferResult:
    pending.event.hold_compute()
    failed = list(pending.failed)
    for ids, are_damaged in pending.checks:
        failed += [ids[int(index)] for index in are_damaged.nonzero()]
    return TransferResult(pending.transfer_id, tuple(failed))


def _are_neighbours(ids: list[int]) -> bool:
    return ids == list(range(ids[0], ids[0] + len(ids)))
