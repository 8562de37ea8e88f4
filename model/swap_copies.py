"""Copies of blocks between the device and the CPU tier: begun in one step, ended in the same or a later one."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Final

import torch

from kernels.block_copy import gather_blocks, scatter_blocks
from kernels.checksum import block_checksums
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
    failed: list[int] = field(default_factory=list)
    checks: list[tuple[list[int], torch.Tensor]] = field(default_factory=list)
    event: torch.cuda.Event | None = None

    def has_ended(self) -> bool:
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]


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
    direction, beside the step's computation; that path has not been run yet. There scattered blocks that are small go
    through a staging buffer, in one copy; `is_staging` decides it for tests.
    """

    def __init__(self, device_blocks: torch.Tensor, tier: CpuTier, *, is_staging: bool | None = None) -> None:
        self._blocks = device_blocks
        self._tier = tier
        self._pending: list[_Pending] = []
        is_cuda = device_blocks.device.type == "cuda"
        block_bytes = device_blocks[:1].nbytes
        if is_staging is None:
            is_staging = is_cuda and block_bytes < MIN_DIRECT_BYTES
        self._max_staged = max(1, MAX_STAGED_BYTES // block_bytes) if is_staging else 0
        self._out_stream = _new_stream(device_blocks.device) if is_cuda else None
        self._in_stream = _new_stream(device_blocks.device) if is_cuda else None

    def begin(self, outs: Sequence[Transfer], ins: Sequence[Transfer]) -> None:
        """Begin to copy: to the CPU, and to the device."""
        for transfer in outs:
            with self._on(self._out_stream):
                self._begin_out(transfer)
        for transfer in ins:
            with self._on(self._in_stream):
                self._begin_in(transfer)

    def ended(self, *, is_waiting: bool) -> tuple[TransferResult, ...]:
        """Those that have ended since the last call. `is_waiting`: wait for the oldest, if there is one."""
        if is_waiting and self._pending and self._pending[0].event is not None:
            self._pending[0].event.synchronize()
        done = [pending for pending in self._pending if pending.has_ended()]
        self._pending = [pending for pending in self._pending if pending not in done]
        return tuple(self._result(pending) for pending in done)

    def _begin_out(self, transfer: Transfer) -> None:
        pending, tier = _Pending(transfer.transfer_id), self._tier
        for ids, dst in runs_of(transfer.copies, tier.slab_blocks, is_out=True, max_staged=self._max_staged):
            count = len(ids)
            if not tier.try_grow(dst):
                pending.failed += range(dst, dst + count)
                continue
            source = self._blocks[ids[0] : ids[0] + count]
            if not _are_neighbours(ids):
                source = self._staging(count)
                gather_blocks(self._blocks, self._to_device(ids), source)
            tier.checksums[dst : dst + count].copy_(block_checksums(source), non_blocking=True)
            tier.blocks(dst, count).copy_(source, non_blocking=True)
        self._add(pending, self._out_stream)

    def _begin_in(self, transfer: Transfer) -> None:
        pending, tier = _Pending(transfer.transfer_id), self._tier
        for ids, src in runs_of(transfer.copies, tier.slab_blocks, is_out=False, max_staged=self._max_staged):
            count = len(ids)
            is_direct = _are_neighbours(ids)
            target = self._blocks[ids[0] : ids[0] + count] if is_direct else self._staging(count)
            target.copy_(tier.blocks(src, count), non_blocking=True)
            expected = tier.checksums[src : src + count].to(target.device, non_blocking=True)
            is_damaged = block_checksums(target) != expected
            pending.checks.append((ids, self._to_host(is_damaged)))
            if not is_direct:
                scatter_blocks(target, self._to_device(ids), self._blocks)
        self._add(pending, self._in_stream)

    def _staging(self, count: int) -> torch.Tensor:
        """Of the current stream's memory, so that it isn't given to anything before that stream is through with it."""
        return torch.empty((count, *self._blocks.shape[1:]), dtype=self._blocks.dtype, device=self._blocks.device)

    def _to_device(self, ids: list[int]) -> torch.Tensor:
        is_cuda = self._blocks.device.type == "cuda"
        return torch.tensor(ids, pin_memory=is_cuda).to(self._blocks.device, non_blocking=True)

    def _to_host(self, flags: torch.Tensor) -> torch.Tensor:
        if flags.device.type == "cpu":
            return flags
        host = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
        return host.copy_(flags, non_blocking=True)

    def _on(self, stream: "torch.cuda.Stream | None") -> AbstractContextManager[object]:
        if stream is None:
            return nullcontext()
        stream.wait_stream(torch.cuda.current_stream(self._blocks.device))
        return torch.cuda.stream(stream)

    def _add(self, pending: _Pending, stream: "torch.cuda.Stream | None") -> None:
        if stream is not None:
            pending.event = stream.record_event()
        self._pending.append(pending)

    def _result(self, pending: _Pending) -> TransferResult:
        if pending.event is not None:
            torch.cuda.current_stream(self._blocks.device).wait_event(pending.event)
        failed = list(pending.failed)
        for ids, is_damaged in pending.checks:
            failed += [ids[int(index)] for index in is_damaged.nonzero()]
        return TransferResult(pending.transfer_id, tuple(failed))


def _are_neighbours(ids: list[int]) -> bool:
    return ids == list(range(ids[0], ids[0] + len(ids)))


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
