"""Copies of blocks between the device and the CPU tier: begun in one step, ended in the same or a later one."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from kernels.checksum import block_checksums
from model.cpu_tier import CpuTier
from scheduler.output import BlockCopy, Transfer, TransferResult


def runs_of(copies: Sequence[BlockCopy], slab_blocks: int, *, is_out: bool) -> list[tuple[int, int, int]]:
    """(first source, first target, number) of runs of neighbours, cut where the CPU side passes into another slab."""
    runs: list[tuple[int, int, int]] = []
    for copy in copies:
        on_cpu = copy.dst if is_out else copy.src
        if runs and on_cpu % slab_blocks:
            src, dst, count = runs[-1]
            if (copy.src, copy.dst) == (src + count, dst + count):
                runs[-1] = (src, dst, count + 1)
                continue
        runs.append((copy.src, copy.dst, 1))
    return runs


@dataclass(slots=True, eq=False)
class _Pending:
    """A transfer that was begun. `checks` are pairs of a first target and a bool tensor [n]: which are damaged."""

    transfer_id: int
    failed: list[int] = field(default_factory=list)
    checks: list[tuple[int, torch.Tensor]] = field(default_factory=list)
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
    direction, beside the step's computation; that path has not been run yet.
    """

    def __init__(self, device_blocks: torch.Tensor, tier: CpuTier) -> None:
        self._blocks = device_blocks
        self._tier = tier
        self._pending: list[_Pending] = []
        is_cuda = device_blocks.device.type == "cuda"
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
        for src, dst, count in runs_of(transfer.copies, tier.slab_blocks, is_out=True):
            if not tier.try_grow(dst):
                pending.failed += range(dst, dst + count)
                continue
            source = self._blocks[src : src + count]
            tier.checksums[dst : dst + count].copy_(block_checksums(source), non_blocking=True)
            tier.blocks(dst, count).copy_(source, non_blocking=True)
        self._add(pending, self._out_stream)

    def _begin_in(self, transfer: Transfer) -> None:
        pending, tier = _Pending(transfer.transfer_id), self._tier
        for src, dst, count in runs_of(transfer.copies, tier.slab_blocks, is_out=False):
            target = self._blocks[dst : dst + count]
            target.copy_(tier.blocks(src, count), non_blocking=True)
            expected = tier.checksums[src : src + count].to(target.device, non_blocking=True)
            is_damaged = block_checksums(target) != expected
            pending.checks.append((dst, self._to_host(is_damaged)))
        self._add(pending, self._in_stream)

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
        for first, is_damaged in pending.checks:
            failed += [first + int(index) for index in is_damaged.nonzero()]
        return TransferResult(pending.transfer_id, tuple(failed))


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
