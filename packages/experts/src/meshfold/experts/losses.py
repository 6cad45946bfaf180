"""The losses of a model's routers, own ones or those that :func:`meshfold.experts.keep_routing` watches."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from meshfold.experts.balance import balance_loss_of, z_loss_of
from meshfold.experts.keep import read_sums
from meshfold.mesh import Group


def balance_loss(model: nn.Module, group: Group | None = None, *, over: Literal["layer", "model"] = "layer") -> Tensor:
    """Return the balance loss of the last forward of every router in a model: a scalar, to be added to the loss with a factor.

    Args:
        model: has routers that ran forward: in training mode with gradients.
        group: the ranks that share the batch; the loss is of all their tokens, in one all-reduce. None: the ranks that an engine
            has split it over; without an engine, this rank has all of it.
        over: see :func:`meshfold.experts.balance_loss_of`.

    Raises:
        SpecError: without such a router.
    """
    sums, reduce = read_sums(model)
    return balance_loss_of(sums, group or reduce, over=over)


def z_loss(model: nn.Module, group: Group | None = None) -> Tensor:
    """Return the z-loss of the last forward of every router in a model, a scalar; otherwise as :func:`balance_loss`."""
    sums, reduce = read_sums(model)
    return z_loss_of(sums, group or reduce)
