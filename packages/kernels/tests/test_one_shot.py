"""The one-shot sum: its reference, the rows that it takes, and its slots."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F

from meshfold.kernels import (
    OneShotMemory,
    one_shot_bytes,
    one_shot_rows,
    one_shot_slot,
    one_shot_sum,
    packet_bytes,
    packet_rows,
    packet_sum,
    sum_add_norm,
)
from meshfold.kernels.one_shot_packets import packets_of, rows_of


def test_the_reference_is_a_sum_an_add_and_a_norm() -> None:
    random = torch.Generator().manual_seed(0)
    parts = [torch.randn(3, 10, generator=random, dtype=torch.float64) for _ in range(4)]
    stream, gain = torch.randn(3, 10, generator=random, dtype=torch.float64), torch.rand(10, dtype=torch.float64)
    total, y = sum_add_norm(parts, stream, gain, 1e-5)
    assert torch.allclose(total, sum(parts), atol=1e-14)  # type: ignore[arg-type]
    assert torch.allclose(y, F.rms_norm(stream + total, (10,), gain, 1e-5), atol=1e-14)
    summed, same = sum_add_norm(parts, stream, gain, 1e-5, adds=True)
    assert torch.equal(summed, stream + total) and torch.equal(same, y)
    # In bfloat16 sums are rounded once: 256 + 1 + 1 would stay 256 if each was.
    ones = [torch.full((1, 4), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    total, _ = sum_add_norm(ones, torch.zeros(1, 4, dtype=torch.bfloat16), torch.ones(4), 0.0)
    assert total.tolist() == [[258.0] * 4]


def test_it_is_for_few_rows_of_the_ranks_of_one_machine() -> None:
    assert [one_shot_rows(4096, 2, ranks) for ranks in (1, 2, 4, 8, 9)] == [0, 64, 21, 9, 0]
    assert one_shot_rows(8192, 4, 2) == 16 and one_shot_rows(65536, 2, 2) == 0
    # 3 slots of 9 rows, and flags of 8 ranks for each in units of 256 bytes
    assert one_shot_bytes(9, 4096, 2, 8) == 1024 + 3 * 9 * 4096 * 2


@pytest.mark.parametrize("calls", [2, 3, 7, 64])
def test_no_slot_is_used_twice_in_a_row(calls: int) -> None:
    slots = [one_shot_slot(call) for _ in range(3) for call in range(calls)]
    assert set(slots) <= {0, 1, 2} and all(a != b for a, b in itertools.pairwise(slots))


def test_rows_without_room_are_refused() -> None:
    memory = OneShotMemory(torch.zeros(2, dtype=torch.int64), 0, 2, 8, torch.float32)
    for x in (torch.ones(3, 8), torch.ones(2, 4), torch.ones(2, 8, dtype=torch.float64)):
        with pytest.raises(ValueError, match="at most 2 rows of 8 elements"):
            one_shot_sum(x, x, x[0], 1e-5, memory, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_packets_carry_rows_and_the_epoch_of_their_call(dtype: torch.dtype) -> None:
    x = torch.randn(3, 10, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, :2] = torch.tensor([-0.0, float("inf")], dtype=dtype)
    for epoch in (1, 2**31 - 1):
        packets = packets_of(x, epoch)
        assert packets.shape == (3, 10 * dtype.itemsize // 4)
        found = rows_of(packets, epoch, dtype)
        assert found is not None and torch.equal(found.view(torch.int16), x.view(torch.int16))
        packets[2, 1] = packets_of(x, epoch - 1)[2, 1]  # of the call before
        assert rows_of(packets, epoch, dtype) is None


def test_packets_are_for_messages_of_64_kib() -> None:
    assert [packet_rows(4096, 2, ranks) for ranks in (1, 2, 4, 8, 9)] == [0, 8, 8, 8, 0]
    assert packet_rows(8192, 4, 2) == 2 and packet_rows(7, 2, 2) == 0 and packet_rows(64, 8, 2) == 0
    # epochs of 32 parts in units of 256 bytes; 3 slots of 4 ranks with 8 rows of 2048 words
    assert packet_bytes(8, 4096, 2, 4) == 3 * 8 * 32 * 4 + 3 * 4 * 8 * 2048 * 8
    memory = OneShotMemory(torch.zeros(2, dtype=torch.int64), 0, 2, 8, torch.float32)
    with pytest.raises(ValueError, match="at most 2 rows of 8 elements"):
        packet_sum(torch.ones(3, 8), torch.ones(3, 8), torch.ones(8), 1e-5, memory, 0)
