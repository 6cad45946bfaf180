"""When an accumulation of gradients begins: once for each, also where a forward comes between backward and step."""

from unittest.mock import MagicMock

import torch

from meshfold.engine.states.accumulation import Accumulation


def accumulation() -> tuple[Accumulation, MagicMock]:
    states = MagicMock()
    states.named_parameters = {}
    made = Accumulation(states, MagicMock(scale=1.0), shows_none=False)
    return made, states


def train(gradients: Accumulation) -> None:
    gradients.backward(torch.ones((), requires_grad=True), "last", shown=False)


def test_a_forward_between_backward_and_step_does_not_keep_the_next_accumulation_from_beginning() -> None:
    gradients, states = accumulation()
    train(gradients)
    gradients.begin()  # a forward whose backward never comes
    gradients.finish()
    gradients.forget()
    begun = states.begin.call_count
    gradients.begin()
    assert states.begin.call_count == begun + 1
    assert states.begin.call_args.kwargs == {"first": True}


def test_a_forward_before_zero_grad_keeps_its_backward() -> None:
    """``output = engine(x); engine.zero_grad(); engine.backward(loss)``, as many loops have it."""
    gradients, states = accumulation()
    gradients.begin()
    gradients.forget()
    train(gradients)
    assert states.begin.call_count == 1
