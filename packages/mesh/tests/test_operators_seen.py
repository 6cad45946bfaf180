"""Counts of operators, which tests of what a step launches use."""

from __future__ import annotations

import torch

from meshfold.mesh.testing import Operators


def test_operators_are_counted_in_forward_and_backward_with_the_largest_result() -> None:
    x, w = torch.ones(2, 3), torch.ones(3, 5, requires_grad=True)
    with Operators() as seen:
        assert seen.largest == 0
        (x @ w).sum().backward()
    torch.mm(x, w)
    assert (seen.seen["mm"], seen.seen["sum"], seen.largest) == (2, 1, 15)
