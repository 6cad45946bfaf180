"""Counts of what a split layer makes the host do in eager code: nodes of autograd, operators, Python calls of ours.

Where kernels are short, the host's work is the time of a layer. A count that must grow is a decision, not an accident.
"""

from __future__ import annotations

import sys
from collections import Counter
from itertools import product
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshfold.mesh import Mesh
from meshfold.mesh.testing import Operators, fake_world
from meshfold.tensor_parallel.layers import LayerNorm, Linear


def layer_of(kind: str, mode: str) -> tuple[nn.Module, Tensor]:
    """Return a layer of 8 features, and an input."""
    mesh = Mesh({"tensor": 2})
    if kind == "norm":
        return LayerNorm(8, mesh=mesh, mode=mode), torch.randn(2, 4, 8, requires_grad=True)
    width = 8 if kind == "column" else 4
    role: Any = kind
    return Linear(8, 8, mesh=mesh, mode=mode, role=role), torch.randn(2, 4, width, requires_grad=True)


def nodes(y: Tensor) -> Counter[str]:
    """Count the nodes of a graph, less those that add to a leaf's gradient."""
    found: Counter[str] = Counter()
    seen, left = {y.grad_fn}, [y.grad_fn]
    while left:
        node = left.pop()
        assert node is not None
        found[node.name().rsplit("::", 1)[-1]] += 1
        new = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= new
        left += new
    del found["AccumulateGrad"]
    return found


def calls_of_ours(layer: nn.Module, x: Tensor, dy: Tensor) -> Counter[str]:
    """Count the Python functions of meshfold that a forward and a backward call, when both have run before."""
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "meshfold" in frame.f_code.co_filename and frame.f_code.co_filename != __file__:
            found[frame.f_code.co_qualname] += 1

    for _ in range(2):
        layer(x).backward(dy)
    sys.setprofile(note)
    try:
        layer(x).backward(dy)
    finally:
        sys.setprofile(None)
    return found


def test_a_layer_is_one_node_of_autograd() -> None:
    with fake_world(2):
        for kind, mode in product(("column", "row"), ("1d", "1d+sequence")):
            layer, x = layer_of(kind, mode)
            # Under 1d+sequence ranks have different tokens of what a row layer makes: its bias's gradient is summed.
            summed = {"PairBackward": 1} if (kind, mode) == ("row", "1d+sequence") else {}
            assert nodes(layer(x)) == {"MatmulBackward": 1, **summed}, (kind, mode)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_bias_is_added_by_the_product_of_partial_sums_on_their_first_rank_alone(rank: int) -> None:
    with fake_world(2, rank):
        for kind, mode in product(("column", "row"), ("1d", "1d+sequence")):
            layer, x = layer_of(kind, mode)
            with Operators() as forward:
                y = layer(x)
            with Operators() as backward:
                y.backward(torch.ones_like(y))
            adds = kind == "column" or rank == 0
            products = {name: forward.seen[name] for name in ("addmm", "mm", "add")}
            assert products == {"addmm": int(adds), "mm": int(not adds), "add": 0}, (kind, mode)
            gradients = {name: backward.seen[name] for name in ("mm", "sum", "add")}
            assert gradients == {"mm": 2, "sum": 1, "add": 0}, (kind, mode)


def test_a_bias_is_an_operator_of_its_own_in_what_a_plan_counts() -> None:
    with fake_world(2):
        layer, x = layer_of("column", "1d")
        layer, x = layer.to("meta"), x.detach().to("meta")
        with Operators() as seen:
            layer(x)
    assert (seen.seen["mm"], seen.seen["add"]) == (1, 1)


def test_a_layer_calls_few_functions_of_ours() -> None:
    most = {
        ("column", "1d"): 31,  # 91 when every call looked for what its plan sends
        ("row", "1d"): 35,  # 91
        ("column", "1d+sequence"): 84,  # 127
        ("row", "1d+sequence"): 73,  # 122
        ("norm", "1d"): 47,  # 53
        ("norm", "1d+sequence"): 53,  # 57
    }
    with fake_world(2):
        for (kind, mode), limit in most.items():
            layer, x = layer_of(kind, mode)
            calls = calls_of_ours(layer, x, torch.ones_like(layer(x)))
            assert 0 < sum(calls.values()) <= limit, (kind, mode, calls.most_common())


def test_only_what_is_sent_is_pending() -> None:
    with fake_world(2):
        for kind in ("column", "row"):  # dx, y
            layer, x = layer_of(kind, "1d")
            assert calls_of_ours(layer, x, torch.ones_like(layer(x)))["Pending.__init__"] <= 1
