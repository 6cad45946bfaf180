"""Rows beyond those that backward keeps are computed again: exact whether they exist, and whether the host knows it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
from expert_models import EXPERTS, FFN, HIDDEN, close
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from meshfold.experts import ExpertRows, Experts, dispatch, feed_forward, find_experts, shard_experts, spilled
from meshfold.mesh import Mesh
from meshfold.mesh.processes import start_reading
from meshfold.mesh.testing import ranks

TOKENS, TOP_K = 24, 2


def of_a_rank(rank: int, uneven: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, experts and weights: all experts get as many tokens, or the first two get all, which is four times the mean."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, generator=generator)
    index = torch.arange(TOKENS * TOP_K).view(TOKENS, TOP_K) % (2 if uneven else EXPERTS)
    return x, index, torch.rand(TOKENS, TOP_K, dtype=torch.float64, generator=generator)


@contextmanager
def parts_of_few_rows() -> Iterator[None]:
    """Context manager: a few rows beyond those kept are computed apart, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module("meshfold.experts.dispatch"), "FEW", 0)
        yield


class Sharded:
    """The experts of this rank, whose runs are counted."""

    def __init__(self) -> None:
        self.group = Mesh({"expert": 4}).group("expert")
        torch.manual_seed(2)
        self.experts = Experts(HIDDEN, FFN, EXPERTS).double()
        [self.block] = find_experts(self.experts)
        shard_experts(self.block, self.group)
        self.runs: list[tuple[int, bool, bool]] = []  # rows, whether autograd records them, whether under autocast

    def run(self, rows: ExpertRows) -> Tensor:
        seen = rows.values.shape[0], torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        self.runs.append(seen)
        return feed_forward(self.block.layout, self.experts, rows)

    def gradients(
        self, uneven: bool, *, cast: bool = False, cast_backward: bool = False, **settings: Any
    ) -> list[Tensor]:
        """Return outputs and all gradients. ``cast``, ``cast_backward``: the forward, the backward run under autocast."""
        self.runs.clear()
        x, index, weights = of_a_rank(self.group.index, uneven)
        x, weights = (t.to(self.experts.down.dtype).requires_grad_() for t in (x, weights))
        own = {name: self.experts.get_parameter(name) for name in self.block.layout.names}
        how: dict[str, Any] = dict(experts=EXPERTS, group=self.group, weighs=True, parameters=own) | settings
        with parts_of_few_rows(), torch.autocast("cpu", torch.bfloat16, enabled=cast):
            y = dispatch(x, index, weights, self.run, **how)
        leaves = [x, weights, *own.values()]
        loss = y.sin().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=cast_backward):
            return [y.detach(), *torch.autograd.grad(loss, leaves)]


MEAN = 4 * TOKENS * TOP_K // 4


@ranks(4)
def test_spilled_rows_are_exact_and_computed_again_only_where_there_are_some() -> None:
    layer, whole = Sharded(), 4 * MEAN
    kept, rest = (2 * MEAN, True, False), whole - 2 * MEAN
    forward = [kept, (rest, False, False)]
    for uneven in (False, True):
        expected = layer.gradients(uneven, exchange="all_to_all")
        assert layer.runs == [(MEAN if not uneven else whole * (layer.group.index == 0), True, False)]
        for one, other in zip(layer.gradients(uneven, exchange="all_gather"), expected, strict=True):
            close(one, other)
        again = uneven and layer.group.index == 0  # the only rank with more than twice the mean
        assert layer.runs == forward + again * [(rest, True, False)]
        # Where the number of rows has not arrived, backward computes all parts.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spilled, "start_reading", lambda number: lambda: None)
            for one, other in zip(layer.gradients(uneven, exchange="all_gather"), expected, strict=True):
                close(one, other)
        assert layer.runs == [*forward, (rest, True, False)]
    expected = layer.gradients(True, exchange="all_to_all", weighs=False)
    for one, other in zip(layer.gradients(True, exchange="all_gather", weighs=False), expected, strict=True):
        close(one, other)
    layer.gradients(True, exchange="all_gather", capacity=100.0)  # room is for all tokens, but no more
    assert [rows for rows, _, _ in layer.runs[:2]] == [2 * MEAN, rest]
    layer.gradients(True, exchange="all_gather", capacity=2.0)
    assert layer.runs == [kept]
    x, index, weights = of_a_rank(layer.group.index, False)  # so few rows are all kept
    how: dict[str, Any] = dict(experts=EXPERTS, group=layer.group, exchange="all_gather", parameters={})
    dispatch(x, index, weights, layer.run, **how)
    assert layer.runs[1:] == [(whole, True, False)]


@ranks(4)
def test_all_parts_run_under_the_autocast_of_the_forward() -> None:
    """Products in bfloat16 of tokens in float32, in a backward outside of autocast."""
    layer = Sharded()
    layer.experts.float()
    expected = layer.gradients(True, cast=True, exchange="all_to_all")
    for one, other in zip(layer.gradients(True, cast=True, exchange="all_gather"), expected, strict=True):
        assert one.dtype == other.dtype == torch.float32
        close(one, other, rtol=1e-2, atol=1e-2)
    assert {cast for _, _, cast in layer.runs} == {True} and len(layer.runs) == 2 + (layer.group.index == 0)
    layer.gradients(True, cast_backward=True, exchange="all_gather")
    assert {cast for _, _, cast in layer.runs} == {False} and len(layer.runs) == 2 + (layer.group.index == 0)


@ranks(4)
def test_parts_take_part_in_recomputation_and_in_a_backward_in_two_passes() -> None:
    """Checkpoints run the forward again inside of a backward; pipelines may ask for gradients of inputs before those of weights."""
    layer = Sharded()
    x, index, weights = of_a_rank(layer.group.index, True)
    own = {name: layer.experts.get_parameter(name) for name in layer.block.layout.names}
    leaves = [x.requires_grad_(), weights.requires_grad_(), *own.values()]

    def forward(x: Tensor, weights: Tensor) -> Tensor:
        how: dict[str, Any] = dict(
            experts=EXPERTS, group=layer.group, weighs=True, parameters=own, exchange="all_gather"
        )
        with parts_of_few_rows():
            return dispatch(x, index, weights, layer.run, **how).sin()

    expected = torch.autograd.grad(forward(x, weights).sum(), leaves)
    y = checkpoint(forward, x, weights, use_reentrant=False)
    y.sum().backward()
    loss = forward(x, weights).sum()
    two = [*torch.autograd.grad(loss, leaves[:2], retain_graph=True), *torch.autograd.grad(loss, leaves[2:])]
    for leaf, second, other in zip(leaves, two, expected, strict=True):
        close(leaf.grad, other)
        close(second, other)


@ranks(4)
def test_kept_bytes_are_not_those_of_all_rows() -> None:
    """Backward keeps twice the rows of an all-to-all between the products of even routing; before, four times."""
    layer, kept = Sharded(), dict[str, int]()
    for exchange in ("all_to_all", "all_gather"):
        sizes: dict[int, int] = {}

        def note(x: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() * (x.shape[-1] in (FFN, 2 * FFN))
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            layer.gradients(False, exchange=exchange)
        kept[exchange] = sum(sizes.values())
    experts = sum(p.numel() * 8 for p in layer.experts.parameters())
    assert (kept["all_gather"] - experts) <= 2.1 * (kept["all_to_all"] - experts), kept


def test_a_number_is_read_without_a_wait() -> None:
    assert start_reading(torch.tensor([7], dtype=torch.int32))() == 7
