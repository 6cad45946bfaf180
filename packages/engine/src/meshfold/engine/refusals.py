"""Models that cannot be trained as they are, said before anything starts."""

from __future__ import annotations

import torch
from torch import nn

from meshfold.engine.world import World
from meshfold.mesh import SpecError, all_reduce
from meshfold.mesh.metadata import placed
from meshfold.mesh.names import plain


def refuse_complex(model: nn.Module) -> None:
    """Raise a SpecError for a parameter of complex numbers, of which a precision would keep the real part."""
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise SpecError(
                f"parameter {name!r} is of {parameter.dtype}, and a precision is one of real numbers: keep its real and imaginary "
                "parts (torch.view_as_real) as a parameter, and put them together in forward (torch.view_as_complex)"
            )


def refuse_empty(model: nn.Module, world: World) -> None:
    """Raise a SpecError for a parameter of no elements, which no chunk could hold."""
    for name, parameter in model.named_parameters():
        shape = placed(parameter, world.mesh).placement.shape
        if 0 in shape:
            raise SpecError(
                f"zero: parameter {plain(name)!r} of shape {tuple(shape)} has no elements, so there is nothing of it to share "
                "out: leave it out of the model, or register it as a buffer"
            )


def require_trained(model: nn.Module, count: int, world: World) -> None:
    """Raise a SpecError if no stage has anything to train; a single one may have nothing.

    Args:
        model: this rank's part.
        count: of its parameters that are trained.
        world: all ranks of a pipeline must call.
    """
    if world.pipelined and world.device.type != "meta":
        count = int(all_reduce(torch.tensor(count, device=world.device), world.pipe_group))
    if count == 0:
        there = next(model.parameters(), None) is not None
        why = (
            "all are frozen (requires_grad=False): unfreeze some"
            if there
            else "there are none: give a model that has some"
        )
        raise SpecError(
            f"an optimizer, and no parameter of {type(model).__name__} is to be trained: {why}, or leave optimizer out, for "
            "evaluation only"
        )
