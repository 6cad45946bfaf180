"""Gradients that are made together, and gradients of parameters whose values are put away."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshfold.mesh.parameters.deferred_wgrad import accumulate_grad, after_gradients, gradient_scope


def test_an_empty_parameter_takes_its_gradient_through_its_hooks() -> None:
    """As ZeRO stage 3 leaves it between uses; the values that were there come back."""
    parameter, found = nn.Parameter(torch.ones(2, 3)), list[Tensor]()

    def take(tensor: Tensor) -> None:
        assert tensor.grad is not None
        found.append(tensor.grad)
        tensor.grad = None

    parameter.register_post_accumulate_grad_hook(take)
    empty = parameter.data = torch.empty(0)
    gradient = torch.arange(6.0).view(2, 3)
    accumulate_grad(parameter, gradient)
    assert len(found) == 1 and torch.equal(found[0], gradient)
    assert parameter.shape == (0,) and parameter.data_ptr() == empty.data_ptr()


def test_what_asks_is_called_when_all_gradients_are_there() -> None:
    """Once, behind several backwards; without them at the end of the one that runs."""
    parameter, calls = nn.Parameter(torch.ones(2)), list[str]()

    def ask(_: Tensor) -> None:
        calls.append("gradient")
        after_gradients(lambda: calls.append("all"))

    handle = parameter.register_post_accumulate_grad_hook(ask)
    with gradient_scope():
        parameter.sum().backward()
        with gradient_scope():
            parameter.sum().backward()
        assert calls == ["gradient"] * 2
    assert calls == ["gradient"] * 2 + ["all"] * 2
    calls.clear()
    parameter.sum().backward()
    assert calls == ["gradient", "all"]
    handle.remove()


def test_what_raises_calls_nobody() -> None:
    calls: list[str] = []
    try:
        with gradient_scope():
            after_gradients(lambda: calls.append("all"))
            raise ValueError
    except ValueError:
        pass
    with gradient_scope():
        pass
    assert calls == []
