"""Collectives by pushes between CPU ranks: equal to the collectives that they stand for, in any size, and watched."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from meshfold.mesh import CollectiveError, Mesh, all_gather, all_reduce, barrier, reduce_scatter
from meshfold.mesh.collectives import push
from meshfold.mesh.collectives.push import channels
from meshfold.mesh.collectives.push.host import HostTransport
from meshfold.mesh.collectives.push.part_sums import SQUARED_TOGETHER, sum_parts_reference
from meshfold.mesh.group import Group
from meshfold.mesh.recording import record
from meshfold.mesh.testing import close_pools, fake_world, ranks, run_on_ranks
from meshfold.mesh.watchdog import monitor
from meshfold.mesh.watchdog.monitor import watch

CPU = torch.device("cpu")
SHAPES = [(1,), (3, 5), (64, 7), (0, 4)]


def group_of(size: int) -> Group:
    return Mesh(dict(tensor=size)).group("tensor")


def mine(shape: tuple[int, ...], dtype: torch.dtype, rank: int, call: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(97 * rank + call)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def exact_sum(parts: list[Tensor]) -> Tensor:
    """The sum in float32 (float64 for float64), in the order of the ranks, rounded once."""
    wide = torch.float64 if parts[0].dtype == torch.float64 else torch.float32
    total = torch.zeros_like(parts[0], dtype=wide)
    for part in parts:
        total = total + part.to(wide)
    return total.to(parts[0].dtype)


@ranks(3)
def test_blocks_arrive_in_group_order() -> None:
    group = group_of(3)
    for call, dtype in enumerate((torch.float64, torch.bfloat16, torch.int64)):
        for shape in SHAPES:
            wanted = torch.cat([mine(shape, dtype, rank, call) for rank in range(3)])
            found = push.all_gather_push(mine(shape, dtype, group.index, call), group).wait()
            assert torch.equal(found, wanted)


@ranks(3)
def test_sums_are_those_of_float32_in_the_order_of_ranks_rounded_once() -> None:
    group = group_of(3)
    for call, dtype in enumerate((torch.float64, torch.float32, torch.bfloat16)):
        for rows, *rest in SHAPES:
            shape = (3 * rows, *rest)
            everyone = [mine(shape, dtype, rank, call) for rank in range(3)]
            wanted = exact_sum([part.chunk(3)[group.index] if rows else part for part in everyone])
            found = push.reduce_scatter_push(everyone[group.index], group).wait()
            assert found.dtype == dtype and torch.equal(found, wanted)


@ranks(2)
def test_a_half_precision_wire_may_give_a_float32_sum() -> None:
    group = group_of(2)
    everyone = [mine((8, 3), torch.bfloat16, rank) for rank in range(2)]
    found = push.reduce_scatter_push(everyone[group.index], group, dtype=torch.float32).wait()
    wanted = everyone[0].float() + everyone[1].float()
    assert found.dtype == torch.float32 and torch.equal(found, wanted.chunk(2)[group.index])


@ranks(2)
def test_squares_of_a_sum_are_those_of_what_is_returned_in_pieces_of_any_size() -> None:
    group, size = group_of(2), channels.PIECE_SLOT_BYTES
    try:
        for room in (size, 2 * 2 * 70000):  # in one piece, or 65,536 elements of bfloat16 a piece
            channels.PIECE_SLOT_BYTES = room
            for call, length in enumerate((5, 65536, 200000)):
                everyone = [mine((2 * length,), torch.bfloat16, rank, call) for rank in range(2)]
                pending, squares = push.reduce_scatter_push_squares(everyone[group.index], group, dtype=torch.float32)
                found = pending.wait()
                assert torch.equal(found, (everyone[0].float() + everyone[1].float()).chunk(2)[group.index])
                assert squares is not None and squares.shape == (-(-length // 65536),)
                for block, wanted in zip(squares, found.double().square().split(65536), strict=True):
                    torch.testing.assert_close(block, wanted.sum(), rtol=1e-14, atol=0.0)
    finally:
        channels.PIECE_SLOT_BYTES = size


@ranks(3)
def test_a_sum_of_runs_of_memory_is_that_of_one_tensor() -> None:
    group, size = group_of(3), channels.PIECE_SLOT_BYTES
    whole = mine((3 * 700,), torch.bfloat16, group.index)
    layouts = (
        (2100,),
        (700, 700, 700),
        (1, 0, 1398, 701),
        (650, 100, 650, 100, 600),
    )  # a rank's block in one run, or in two
    try:
        for room in (size, 3 * 2 * 256):
            channels.PIECE_SLOT_BYTES = room
            wanted, squares = push.reduce_scatter_push_squares(whole, group, dtype=torch.float32)
            for lengths in layouts:
                runs = [run.clone().view(1, -1) for run in whole.split(lengths)]
                with record() as log:
                    found, measured = push.reduce_scatter_push_squares(runs, group, dtype=torch.float32)
                    assert torch.equal(found.wait(), wanted.wait())
                assert (measured is None) == (squares is None)
                assert measured is None or torch.equal(measured, squares)
                assert [(entry.kind, entry.block_bytes) for entry in log.entries] == [("reduce_scatter", 4200)]
                assert torch.equal(torch.cat(runs, 1).view(-1), whole)
    finally:
        channels.PIECE_SLOT_BYTES = size


@ranks(2)
def test_squares_that_pieces_would_cut_or_that_are_not_exact_are_not_returned() -> None:
    group, size = group_of(2), channels.PIECE_SLOT_BYTES
    assert push.reduce_scatter_push_squares(torch.ones(4, dtype=torch.float64), group)[1] is None
    channels.PIECE_SLOT_BYTES = 1000
    try:
        pending, squares = push.reduce_scatter_push_squares(torch.ones(2000), group)
        assert squares is None and float(pending.wait().sum()) == 2000.0
    finally:
        channels.PIECE_SLOT_BYTES = size


@ranks(2)
def test_messages_larger_than_a_slot_go_in_pieces() -> None:
    group, size = group_of(2), channels.PIECE_SLOT_BYTES
    channels.PIECE_SLOT_BYTES = 1000  # 62 float64 a block
    try:
        for call, length in enumerate((1, 62, 63, 64, 500, 997)):
            everyone = [mine((2 * length,), torch.float64, rank, call) for rank in range(2)]
            gathered = push.all_gather_push(everyone[group.index], group)
            summed = push.reduce_scatter_push(everyone[group.index], group)
            assert torch.equal(summed.wait(), (everyone[0] + everyone[1]).chunk(2)[group.index])
            assert torch.equal(gathered.wait(), torch.cat(everyone))
    finally:
        channels.PIECE_SLOT_BYTES = size


@ranks(2)
def test_a_block_may_lie_in_the_memory_that_it_is_gathered_into() -> None:
    group = group_of(2)
    whole = torch.full((6,), -1.0)
    own = whole[3 * group.index : 3 * group.index + 3]
    own.fill_(group.index)
    push.all_gather_push(own, group, whole).wait()
    assert whole.tolist() == [0, 0, 0, 1, 1, 1]


OPERATIONS = ("follow", "mark", "after", "await_flag", "write", "read", "copy", "raise_flag")


def operations(call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count what a call asks of its transport; each takes the host some microseconds on a GPU."""
    counts: Counter[str] = Counter()

    def counted(name: str, real: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object) -> object:
            counts[name] += 1
            return real(*args)

        return run

    with monkeypatch.context() as patch:
        for name in OPERATIONS:
            patch.setattr(HostTransport, name, counted(name, getattr(HostTransport, name)))
        call()
    return counts


@ranks(2)
def test_streams_are_joined_once_a_call_and_a_piece_takes_six_operations() -> None:
    group, size = group_of(2), channels.PIECE_SLOT_BYTES
    channels.PIECE_SLOT_BYTES = 1024  # 64 float64 a block
    try:
        with pytest.MonkeyPatch.context() as patch:
            for pieces in (1, 3):
                x = torch.ones(2 * 64 * pieces, dtype=torch.float64)
                once = dict(follow=1, mark=2, after=2)
                each = dict(await_flag=2 * pieces, write=pieces, raise_flag=3 * pieces)
                assert operations(lambda x=x: push.reduce_scatter_push(x, group).wait(), patch) == once | each
                own = x[: 64 * pieces]
                gather = operations(lambda own=own: push.all_gather_push(own, group).wait(), patch)
                assert gather == once | each | dict(read=pieces, copy=1)
    finally:
        channels.PIECE_SLOT_BYTES = size


@ranks(4)
def test_groups_of_a_mesh_push_beside_each_other() -> None:
    mesh = Mesh(dict(data=2, tensor=2))
    for call in range(5):
        x = mine((4, 2), torch.float64, mesh.rank, call)
        for axis in ("tensor", "data"):
            assert torch.equal(push.all_gather_push(x, mesh.group(axis)).wait(), all_gather(x, mesh.group(axis), 0))


@ranks(2)
def test_recorded_bytes_are_those_of_the_collectives() -> None:
    group, x = group_of(2), torch.ones(4, 3)
    with record() as pushed:
        push.all_gather_push(x, group).wait()
        push.reduce_scatter_push(x, group).wait()
    with record() as ordinary:
        all_gather(x, group, 0)
        reduce_scatter(x, group, 0)
    assert pushed.entries == ordinary.entries


@ranks(2)
def test_results_may_be_waited_for_in_any_order() -> None:
    group = group_of(2)
    everyone = [[mine((5,), torch.float32, rank, call) for rank in range(2)] for call in range(6)]
    pending = [push.all_gather_push(parts[group.index], group) for parts in everyone]
    for parts, one in reversed(list(zip(everyone, pending, strict=True))):
        assert torch.equal(one.wait(), torch.cat(parts))


def slow_rank(seconds: float) -> list[float]:
    """Two hundred calls in which one rank after another is slow."""
    group, found = group_of(2), []
    for call in range(200):
        if call % 50 == 25 * group.index:
            time.sleep(seconds)
        found.append(float(push.all_gather_push(torch.full((300,), float(call + group.index)), group).wait().sum()))
    barrier(group, CPU)
    return found


def test_a_slow_rank_neither_loses_nor_repeats_a_block() -> None:
    wanted = [300.0 * (2 * call + 1) for call in range(200)]
    assert run_on_ranks(2, slow_rank, 0.02) == [wanted, wanted]


def one_does_not_push() -> str:
    group = group_of(2)
    push.all_gather_push(torch.ones(3), group).wait()  # makes what it needs, for which a busy machine may take longer
    watch(2.0)
    push.all_gather_push(torch.ones(3), group).wait()
    try:
        if group.index == 1:
            looks_for_its_glasses()
        push.reduce_scatter_push(torch.ones(4, 2), group).wait()
        all_reduce(torch.ones(2), group)
    except CollectiveError as error:
        return str(error)
    return "no error"


def looks_for_its_glasses() -> None:
    """Keep rank 1 busy while rank 0 waits for its block, until it has found it."""
    while monitor._running[1]._diagnosis.agreed() is None:  # type: ignore[index]
        time.sleep(0.05)


@pytest.mark.few(1)
def test_the_watchdog_names_the_rank_that_does_not_push() -> None:
    try:
        verdict = run_on_ranks(2, one_does_not_push)[0]
    finally:
        close_pools()
    assert "reduce_scatter of (4, 2) float32 over tensor (ranks 0, 1)" in verdict
    culprit = next(line for line in verdict.splitlines() if line.startswith("  rank 1: "))
    assert "in looks_for_its_glasses" in culprit


def test_simulated_ranks_record_the_ordinary_collectives() -> None:
    with fake_world(8), record() as log:
        group = group_of(8)
        assert push.why_not(group, CPU) == "the ranks are simulated"
        push.all_gather_push(torch.ones(2, 3), group).wait()
        push.reduce_scatter_push(torch.ones(8, 3), group).wait()
    assert [entry.kind for entry in log.entries] == ["all_gather", "reduce_scatter"]


def test_one_rank_alone_sends_nothing() -> None:
    group = Mesh({}).group()
    x = torch.arange(6.0).view(3, 2)
    assert torch.equal(push.all_gather_push(x, group).wait(), x)
    assert torch.equal(push.reduce_scatter_push(x, group).wait(), x)


def test_what_is_not_contiguous_or_does_not_divide_is_refused() -> None:
    with fake_world(4):
        group = group_of(4)
        with pytest.raises(CollectiveError, match=r"pass x.contiguous\(\)"):
            push.all_gather_push(torch.ones(4, 3).t(), group)
        with pytest.raises(CollectiveError, match="dim 0 must be a multiple of 4"):
            push.reduce_scatter_push(torch.ones(6, 3), group)


def test_the_sum_reads_the_own_part_from_its_own_memory() -> None:
    parts = torch.full((3, 5), float("nan"), dtype=torch.bfloat16)
    parts[0], parts[2] = 256.0, 1.0
    out = torch.empty(5, dtype=torch.float32)
    sum_parts_reference(parts, torch.ones(5, dtype=torch.bfloat16), 1, out)
    assert out.tolist() == [258.0] * 5  # summed in bfloat16 it would be 256


def test_the_kernel_sums_as_the_reference() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    assert subprocess.run([sys.executable, __file__], env=environment, timeout=120).returncode == 0


def compare_with_the_kernel(elements: int, *shapes: tuple[int, int]) -> None:
    from meshfold.mesh.collectives.push.part_sums_triton import sum_parts_triton

    for count, index in shapes:
        parts, own = torch.randn(count, elements), torch.randn(elements)
        parts[index] = float("nan")
        found, again, wanted = torch.empty(elements), torch.empty(elements), torch.empty(elements)
        squares, exact = torch.empty(2, -(-elements // SQUARED_TOGETHER), dtype=torch.float64)
        sum_parts_triton(parts, own, index, found)
        sum_parts_triton(parts, own, index, again, squares=squares)
        sum_parts_reference(parts, own, index, wanted, squares=exact)
        assert torch.equal(found, wanted) and torch.equal(again, wanted) and torch.equal(squares, exact)
        torch.testing.assert_close(exact.sum(), wanted.double().square().sum(), rtol=1e-14, atol=0.0)


if __name__ == "__main__":
    for length in (1, 9, 4097):
        compare_with_the_kernel(length, (2, 0), (2, 1), (4, 2))
    compare_with_the_kernel(SQUARED_TOGETHER + 5, (2, 1))  # two sums of squares
