"""The collectives against what every rank can work out for itself."""

from __future__ import annotations

from functools import cache
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from meshfold.mesh import (
    CollectiveError,
    Group,
    Mesh,
    Pending,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    reduce_scatter,
    shift,
)
from meshfold.mesh.collectives import all_gather_into, exchange_rows, issue, operations
from meshfold.mesh.parameters import WatchedParameter, watch
from meshfold.mesh.testing import fake_world, ranks

SHAPE = (4, 8, 12)
DTYPES = [torch.float64, torch.bfloat16, torch.int64]
GROUPS = [("a",), ("b",), ("a", "b"), ("b", "a"), ("t",), ("t/2",), ("t%2",), ("missing",)]


@cache
def meshes() -> tuple[Mesh, Mesh]:
    return Mesh({"a": 2, "b": 2}), Mesh({"t": 4})


def group_of(axes: tuple[str, ...]) -> Group:
    square, line = meshes()
    return (line if axes[0].startswith("t") else square).group(*axes)


def of_rank(rank: int, dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = SHAPE) -> Tensor:
    """What a rank holds: small integers, so that every dtype sums them exactly."""
    return torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def held(group: Group, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [of_rank(rank, dtype) for rank in group.ranks]


def same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@ranks(4)
def test_every_collective_over_every_group_and_dim(dtype: torch.dtype) -> None:
    for axes in GROUPS:
        group = group_of(axes)
        mine, all_of_them = of_rank(group.ranks[group.index], dtype), held(group, dtype)
        before, total = mine.clone(), sum(all_of_them[1:], all_of_them[0])
        same(all_reduce(mine, group), total)
        same(all_reduce(mine, group, "max"), torch.stack(all_of_them).amax(0))
        same(all_reduce(mine, group, "min"), torch.stack(all_of_them).amin(0))
        for dim in (0, 1, 2, -1, -3):
            same(all_gather(mine, group, dim), torch.cat(all_of_them, dim))
            same(reduce_scatter(mine, group, dim), total.chunk(group.size, dim)[group.index])
        for split, concat in permutations((0, 1, 2), 2):
            blocks = [other.chunk(group.size, split)[group.index] for other in all_of_them]
            same(all_to_all(mine, group, split, concat), torch.cat(blocks, concat))
        for source in range(group.size):
            same(broadcast(mine, group, source), all_of_them[source])
        for steps in (1, -1, 2, 5, 0):
            same(shift(mine, group, steps), all_of_them[(group.index - steps) % group.size])
        same(mine, before)  # no collective writes into its input


@ranks(4)
def test_several_are_on_their_way_at_once() -> None:
    group = group_of(("t",))
    all_of_them = held(group)
    mine, total = all_of_them[group.index], sum(all_of_them[1:], all_of_them[0])
    pending = [
        all_gather(mine, group, 1, async_op=True),
        reduce_scatter(mine, group, 2, async_op=True),
        all_reduce(mine, group, async_op=True),
        all_to_all(mine, group, 0, 2, async_op=True),
        broadcast(mine, group, 3, async_op=True),
        shift(mine, group, async_op=True),
        shift(mine, group, 0, async_op=True),
    ]
    expected = [
        torch.cat(all_of_them, 1),
        total.chunk(4, 2)[group.index],
        total,
        torch.cat([other.chunk(4, 0)[group.index] for other in all_of_them], 2),
        all_of_them[3],
        all_of_them[group.index - 1],
        mine,
    ]
    for one, want in reversed(list(zip(pending, expected, strict=True))):
        assert isinstance(one, Pending)
        same(one.wait(), want)
        assert one.wait() is one.wait()


@ranks(4)
def test_tensors_that_do_not_lie_in_order() -> None:
    group = group_of(("t",))
    turned = [one.transpose(0, 2) for one in held(group)]
    mine = turned[group.index]
    same(all_gather(mine, group, 1), torch.cat(turned, 1))
    same(reduce_scatter(mine, group, 0), sum(turned[1:], turned[0]).chunk(4, 0)[group.index])
    same(shift(mine, group, 3), turned[(group.index + 1) % 4])
    same(broadcast(mine[1:3], group, 2), turned[2][1:3])
    same(all_to_all(mine, group, 1, 0), torch.cat([t.chunk(4, 1)[group.index] for t in turned], 0))


@ranks(4)
def test_a_group_of_one_gives_back_its_input() -> None:
    group, x = group_of(("missing",)), of_rank(0)
    for found in (
        all_reduce(x, group),
        all_gather(x, group, 1),
        reduce_scatter(x, group, 1),
        all_to_all(x, group, 0, 1),
    ):
        assert found is x
    assert broadcast(x, group, 0) is x and shift(x, group) is x
    assert all_gather(x, group, 0, async_op=True).wait() is x


@ranks(4)
def test_sums_have_the_same_bits_on_every_rank() -> None:
    group = group_of(("t",))
    mine = torch.randn(1000, generator=torch.Generator().manual_seed(group.index))
    total = all_reduce(mine, group)
    assert torch.equal(*all_reduce(torch.stack([total, -total]), group, "max").mul(torch.tensor([[1.0], [-1.0]])))


@ranks(4)
def test_a_tensor_of_the_callers_own_is_summed_in_place() -> None:
    group = group_of(("a", "b"))
    expected = torch.stack(held(group)).sum(0)
    kept, own, turned = (of_rank(meshes()[0].rank) for _ in range(3))
    for given, is_written in ((kept, False), (own, True), (turned.movedim(0, 1), False)):
        found = all_reduce(given, group, own=given is not kept)
        same(found, expected if given.shape == expected.shape else expected.movedim(0, 1))
        assert (found.data_ptr() == given.data_ptr()) is is_written
    same(kept, of_rank(meshes()[0].rank))


@ranks(4)
def test_barrier_returns() -> None:
    barrier(group_of(("t",)))
    barrier(group_of(("missing",)))


@ranks(4)
def test_empty_tensors() -> None:
    group = group_of(("t",))
    assert all_gather(torch.empty(0, 3), group, 0).shape == (0, 3)
    assert all_gather(torch.empty(2, 0), group, 0).shape == (8, 0)
    assert all_reduce(torch.empty(0), group).shape == (0,)


class Asked(TorchDispatchMode):
    """Which of torch's collectives are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "_c10d_functional":
            self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


def every_collective(x: Tensor, group: Group) -> list[Tensor]:
    """Return the results of all, some at once and some awaited later, of a matrix whose sides are multiples of the group's size."""
    me, size = group.index, group.size
    made = [all_gather(x, group, dim) for dim in (0, 1)] + [reduce_scatter(x, group, dim) for dim in (0, 1)]
    made += [all_reduce(x, group, op) for op in ("sum", "max", "min")] + [all_to_all(x, group, 1, 0)]
    pending = [broadcast(x, group, 1, async_op=True), shift(x, group, 1, async_op=True)]
    pending += [all_gather_into(x.new_empty(size * x.shape[0], x.shape[1]), x.contiguous(), group)]
    sends = [1] * (size - 1) + [x.shape[0] - size + 1]  # the last rank gets all that is left
    pending += [exchange_rows(x, group, sends, [sends[me]] * size)]
    return made + [one.wait() for one in pending]


@pytest.mark.parametrize("turned", [False, True])
@ranks(4)
def test_eager_code_calls_the_process_group_and_gets_what_a_trace_gets(turned: bool) -> None:
    group = group_of(("t",))
    x = of_rank(group.index, torch.float32, (8, 12)) / 7
    x = x.T.contiguous().T if turned else x
    before = x.clone()
    with pytest.MonkeyPatch.context() as patch:
        for module in (issue, operations):
            patch.setattr(module, "_ops", None)  # no functional collective may be called
        eager = every_collective(x, group)
    with Asked() as seen:
        traced = every_collective(x, group)
    assert len(seen.names) == 6
    for one, other in zip(eager, traced, strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride()
    assert torch.equal(x, before)


class Marked(Tensor):
    """A subclass, which may have its own way with collectives."""


def test_what_has_to_see_a_collective_gets_a_functional_one() -> None:
    x = torch.ones(4, 4)
    with fake_world(4):
        group = Mesh({"t": 4}).group("t")
        weight = torch.nn.Parameter(x)
        assert issue.process_group(x, group) is not None
        with torch.no_grad():
            assert issue.process_group(weight, group) is not None
            watched = torch.nn.Parameter(x.detach().clone())
            watch(watched)  # as an engine does with weights in 16 bits
            assert type(watched) is WatchedParameter and issue.process_group(watched, group) is not None
        for seen in (weight, x.to("meta"), x.as_subclass(Marked), x.to(torch.complex64)):
            assert issue.process_group(seen, group) is None
        with Asked():
            assert issue.process_group(x, group) is None
        with FakeTensorMode() as mode:
            assert issue.process_group(mode.from_tensor(x), group) is None
        found: list[object] = []
        torch.func.vmap(lambda row: (found.append(issue.process_group(row, group)), row)[1])(x)
        assert found == [None]


def test_no_collective_on_the_cpu_is_one_that_gloo_has_a_long_name_for() -> None:
    """Those corrupt the heap (see collectives.py), once in ten thousand or so: too seldom to wait for it here."""
    with fake_world(4), Asked() as asked:
        group = Mesh({"t": 4}).group("t")
        for x in (torch.ones(4, 4), torch.ones(4, 4).T):
            for dim in (0, 1):
                all_gather(x, group, dim)
                reduce_scatter(x, group, dim)
            all_gather_into(torch.empty(16, 4), x.contiguous(), group).wait()
            all_reduce(x, group)
            all_to_all(x, group, 0, 1)
            broadcast(x, group, 1)
            shift(x, group)
    names = {name.partition(".")[0] for name in asked.names}
    assert names == {
        "all_gather_into_tensor_out",  # ALLGATHER; without _out it is ALLGATHER_COALESCED
        "reduce_scatter_tensor",  # ALLREDUCE, as is the next
        "all_reduce",
        "all_to_all_single",
        "broadcast",
        "wait_tensor",
    }


def test_a_dim_that_the_ranks_do_not_divide_is_refused() -> None:
    with fake_world(4):
        group = Mesh({"t": 4}).group("t")
        with pytest.raises(CollectiveError, match=r"reduce_scatter of \(4, 6\) along dim 1: 4 ranks do not divide 6"):
            reduce_scatter(torch.ones(4, 6), group, -1)
        with pytest.raises(CollectiveError, match=r"all_to_all of \(6, 4\) along dim 0: 4 ranks do not divide 6"):
            all_to_all(torch.ones(6, 4), group, 0, 1)
