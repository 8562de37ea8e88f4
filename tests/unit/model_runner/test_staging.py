"""The ring of pinned buffers, on a device that does nothing before somebody waits for it."""

import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from model.staging import ALIGNMENT, HostCopy, Staging
from tests.unit.model_runner.late_device import LateDevice


def read_later(device: LateDevice, tensor: torch.Tensor, seen: list[torch.Tensor]) -> None:
    """A kernel that reads this tensor."""
    device.launch(lambda: seen.append(tensor.clone()))


@pytest.mark.parametrize("num_buffers", [1, 2, 3])
def test_each_step_s_kernels_see_its_own_arrays_however_late_they_run(num_buffers: int) -> None:
    device = LateDevice()
    staging = Staging(device, 4096, num_buffers)
    seen: list[torch.Tensor] = []
    for step in range(20):
        staging.begin()
        staged = [staging.put(np.full(9, step)), staging.put(np.full((2, 3), step + 0.5, dtype=np.float32))]
        staging.flush()
        for tensor in staged:
            read_later(device, tensor, seen)
    device.record().synchronize()
    assert [each.flatten().tolist() for each in seen[0::2]] == [[step] * 9 for step in range(20)]
    assert [each.tolist() for each in seen[1::2]] == [[[step + 0.5] * 3] * 2 for step in range(20)]


def test_the_double_shows_what_happens_where_nobody_waits() -> None:
    """Pinned memory that is written again before its copy ran: this is what the ring is there to prevent."""
    device = LateDevice()
    staging = Staging(device, 4096, 1)
    staging._ring[0].memory[:] = 0
    seen: list[torch.Tensor] = []
    for step in range(2):
        staging._ring[0].copied = None
        staging.begin()
        tensor = staging.put(np.full(4, step))
        staging.flush()
        read_later(device, tensor, seen)
    device.record().synchronize()
    assert [each.tolist() for each in seen] == [[1] * 4, [1] * 4]


def test_nobody_waits_as_long_as_a_buffer_is_free() -> None:
    device = LateDevice()
    staging = Staging(device, 4096, 3)
    for _ in range(3):
        staging.begin()
        staging.put(np.arange(3))
        staging.flush()
    assert device.num_waits == 0
    staging.begin()
    assert (device.num_waits, device.num_done) == (1, 1), "for the oldest copy alone"


def test_a_step_is_one_copy_whatever_it_brings() -> None:
    device = LateDevice()
    staging = Staging(device, 8192)
    staging.begin()
    for dtype in (np.int64, np.int32, np.float32, np.bool_):
        staging.put(np.ones((3, 5), dtype=dtype))
    staging.put(np.zeros(0, dtype=np.int64))
    staging.flush()
    assert device.num_copies == 1


def test_arrays_keep_shape_and_type_and_start_aligned_at_the_same_addresses_each_step() -> None:
    device = LateDevice()
    staging = Staging(device, 1 << 16)
    arrays: list[npt.NDArray[Any]] = [
        np.arange(7, dtype=np.int32),
        np.arange(6, dtype=np.int64).reshape(2, 3),
        np.zeros((0, 4), dtype=np.float32),
        np.array([True, False]),
        np.arange(40, dtype=np.int32).reshape(5, 8)[:, 1:4],
    ]
    addresses = []
    for _ in range(5):
        staging.begin()
        staged = [staging.put(array) for array in arrays]
        staging.flush()
        device.record().synchronize()
        for tensor, array in zip(staged, arrays, strict=True):
            assert np.array_equal(tensor.numpy(), array)
            assert tensor.numpy().dtype == array.dtype
        addresses.append([tensor.data_ptr() for tensor in staged if tensor.numel()])
    assert all(each == addresses[0] for each in addresses)
    assert len({address % ALIGNMENT for address in addresses[0]}) == 1


def test_what_has_no_room_is_copied_by_itself_and_is_right_too() -> None:
    seed = 5
    rng = random.Random(seed)
    device = LateDevice()
    staging = Staging(device, 1024, 2)
    seen: list[torch.Tensor] = []
    wanted = []
    for _ in range(30):
        staging.begin()
        arrays = [np.array([rng.randrange(1000) for _ in range(rng.choice([3, 40, 300]))]) for _ in range(4)]
        staged = [staging.put(array) for array in arrays]
        staging.flush()
        wanted += [array.tolist() for array in arrays]
        for tensor in staged:
            read_later(device, tensor, seen)
    device.record().synchronize()
    assert [each.tolist() for each in seen] == wanted, f"seed {seed}"


def test_values_come_back_when_they_are_asked_for_and_wait_for_nothing_later() -> None:
    device = LateDevice()
    ids = torch.zeros(3, dtype=torch.int64)
    device.launch(lambda: ids.copy_(torch.tensor([4, 5, 6])))
    copy = HostCopy(ids, device)
    device.launch(ids.zero_)
    assert device.num_done == 0
    assert copy.numpy().tolist() == [4, 5, 6]
    assert device.num_done == 2, "the kernel and the copy, not what was launched behind them"
    assert copy.numpy().tolist() == [4, 5, 6]


def test_on_the_cpu_values_are_there_already() -> None:
    assert HostCopy(torch.tensor([7]), None).numpy().tolist() == [7]
