"""An optimizer made of stand-ins for a model's parameters, to try out before there is any state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshfold.mesh.parameters import ROLE


class Trial(NamedTuple):
    """An optimizer of stand-ins, which have the shapes and roles of parameters but no memory.

    Attributes:
        optimizer: it does not step.
        stand_ins: of each parameter.
    """

    optimizer: torch.optim.Optimizer
    stand_ins: dict[Tensor, nn.Parameter]

    @classmethod
    def of(cls, make: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer], parameters: Iterable[Tensor]) -> Trial:
        """Make the optimizer of the parameters that are trained, of an empty one if none is."""
        found = {parameter: _stand_in(parameter) for parameter in parameters if parameter.requires_grad}
        return cls(make([*found.values()] or [nn.Parameter(torch.empty(0, device="cpu"))]), found)


def _stand_in(parameter: Tensor) -> nn.Parameter:
    found = nn.Parameter(torch.empty((), device="cpu").expand(parameter.shape))
    if hasattr(parameter, ROLE):
        setattr(found, ROLE, getattr(parameter, ROLE))
    return found
