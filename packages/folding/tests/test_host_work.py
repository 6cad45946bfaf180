"""Counts of what blocks over ranks make the host do in eager code: nodes of autograd, launches, walks through a model."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from folding_models import model_of
from torch import Tensor, nn

from meshfold.folding import functions, parallelize_folding, split_parameters, sum_gradients
from meshfold.mesh import Mesh, record
from meshfold.mesh.testing import Operators, fake_world


def nodes(*made: Tensor) -> Counter[str]:
    """Count the nodes of a graph by name."""
    found: Counter[str] = Counter()
    left = [y.grad_fn for y in made]
    seen = {*left}
    while left:
        node = left.pop()
        assert node is not None
        found[node.name()] += 1
        new = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= new
        left += new
    return found


def test_a_tensor_that_is_waited_for_at_once_is_one_node_and_tickets_are_no_launches() -> None:
    zeros = []
    with fake_world(2):
        block: Any = model_of("evoformer", 1, 0.0).blocks[0].float()
        for ranks in (1, 2):
            parallelize_folding(block, Mesh(dict(data=2 // ranks, axial=ranks)), "dap")
            m, z = (torch.randn(1, rows // ranks, 8, 8, requires_grad=True) for rows in (4, 8))
            with Operators() as seen:
                made = block(m, z)
                torch.autograd.backward(made, [torch.ones_like(y) for y in made])
            zeros.append(seen.seen["new_zeros"])
    found = nodes(*made)
    # Three pair biases and one factor of the outer product mean arrive under other work.
    assert (found["_MoveBackward"], found["_BeginBackward"], found["_ArriveBackward"]) == (5, 4, 4)
    assert zeros[1] == zeros[0] and found["_ProductBackward"] == 2


def test_a_product_in_one_step_writes_its_result_once() -> None:
    with fake_world(2):
        block: Any = model_of("evoformer", 1, 0.0).blocks[0].float()
        parallelize_folding(block, Mesh(dict(axial=2)), "dap")
        z = torch.randn(1, 8 // 2, 8, 8, requires_grad=True)
        with Operators() as seen:
            for multiply in (block.pair_stack.tri_mul_out, block.pair_stack.tri_mul_in):
                multiply(z).sum().backward()
    assert seen.seen["copy_"] == 0  # a step's slice is copied into its place


def with_gradients(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model


def summed(model: nn.Module) -> int:
    """Return how many elements sum_gradients sums, of float64 weights."""
    with record() as log:
        sum_gradients(model)
    return sum(entry.block_bytes for entry in log.entries) // 8


def test_gradients_are_summed_by_one_walk_through_a_model_and_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(2):
        model = model_of("evoformer", 2, 0.0)
        parallelize_folding(model, Mesh(dict(axial=2)), "dap")
        first = summed(with_gradients(model))
        walks: list[nn.Module] = []
        walk = nn.Module.named_modules
        monkeypatch.setattr(nn.Module, "named_modules", lambda self, *a, **k: walks.append(self) or walk(self, *a, **k))
        with Operators() as seen:
            assert summed(model) == first > 0
        assert not walks and seen.seen["_foreach_copy_"] == 1 and seen.seen["copy_"] == 0


def test_a_model_that_has_changed_is_walked_through_again() -> None:
    with fake_world(2):
        model: Any = model_of("evoformer", 2, 0.0)
        mesh = Mesh(dict(axial=2))
        parallelize_folding(model, mesh, "dap")
        whole = summed(with_gradients(model))
        block = model.blocks[1]
        own = sum(parameter.numel() for parameter in block.parameters())
        del model.blocks[1]  # a module less
        assert summed(with_gradients(model)) == whole - own
        model.blocks.append(block)  # and it again
        assert summed(with_gradients(model)) == whole
        block.msa_att_row.extra = nn.Parameter(torch.ones(7, dtype=torch.float64))  # a parameter more
        assert summed(with_gradients(model)) == whole + 7
        block.msa_att_row.extra = nn.Parameter(torch.ones(5, dtype=torch.float64))  # another one in its place
        assert summed(with_gradients(model)) == whole + 5
        parallelize_folding(model, Mesh(dict(data=2, axial=1)), "dap")  # other axes
        assert summed(with_gradients(model)) == 0


def test_copies_of_a_model_find_their_own_parameters() -> None:
    with fake_world(2):
        model = model_of("evoformer", 1, 0.0)
        parallelize_folding(model, Mesh(dict(axial=2)), "dap")
        whole = summed(with_gradients(model))
        other = copy.deepcopy(model)
        for parameter, _ in split_parameters(other).values():
            parameter.grad = None
        assert summed(other) == 0 and summed(model) == whole


@pytest.mark.parametrize(
    ("size", "dtype", "trains", "want"),
    [
        (functions.LEAST_NORMALISED, torch.bfloat16, True, True),
        (functions.LEAST_NORMALISED - 1, torch.bfloat16, True, False),  # the host's time is longer
        (functions.LEAST_NORMALISED, torch.float64, True, False),  # which our kernel does not take
        (functions.LEAST_NORMALISED, torch.bfloat16, False, False),  # torch's forward is as fast
    ],
)
def test_large_norms_train_by_our_kernel(size: int, dtype: torch.dtype, trains: bool, want: bool) -> None:
    x = torch.empty(size, dtype=dtype, device="meta")
    assert functions._is_faster_in_ours(x, nn.Parameter(torch.ones(4), requires_grad=trains)) is want
