"""Whole tensors and this rank's blocks of them."""

from __future__ import annotations

import torch
from torch import Tensor

from meshfold.engine.world.world import World
from meshfold.mesh import metadata


def global_shape(local: Tensor, like: Tensor) -> tuple[int, ...]:
    """The shape of the whole tensor of which ``local`` is a block placed like ``like``."""
    meta = metadata(like)
    return tuple(local.shape) if meta is None or local.shape != like.shape else meta.placement.shape


def gather(local: Tensor, like: Tensor, world: World) -> Tensor:
    """The whole of a tensor that lies like another; one of another shape as it is.

    All ranks of one data coordinate must call.
    """
    meta = metadata(like)
    if meta is None or local.shape != like.shape:
        return local.detach()
    return meta.placement.gather(local.detach(), world.mesh)


@torch.no_grad()
def put(whole: Tensor, into: Tensor, like: Tensor) -> None:
    """Copy this rank's block of a whole tensor into a local one that lies like another."""
    meta = metadata(like)
    if meta is None or into.shape != like.shape:
        into.copy_(whole)
    else:
        into.copy_(meta.placement.shard(whole, meta.mesh))


def blocks_of(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's block of a whole tensor, or all of it if it does not lie like the other: a new tensor on the CPU."""
    meta = metadata(like)
    if meta is None or tuple(whole.shape) != meta.placement.shape:
        return whole.clone()
    return meta.placement.shard(whole, meta.mesh)
