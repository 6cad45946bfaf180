"""Metadata, names, hooks and stored values of parameters: the data that crosses the borders between packages.

Gradient reduction reads the axes that a gradient is still to be summed over, and clipping reads the axes to sum squares over. A
checkpoint reads the rectangles of the global tensor. The optimizer needs none of it. No part needs to know a tensor-parallel mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from meshfold.mesh.mesh import Mesh
from meshfold.mesh.placement import Placement

_ATTRIBUTE = "_meshfold"
ROLE = "_meshfold_role"
"""Attribute of a parameter, and of its stand-ins, that tells an optimizer its role in the model."""


@dataclass(frozen=True, slots=True, eq=False)
class ParameterMeta:
    """Layout of a parameter on a mesh.

    Attributes:
        mesh: where it lies.
        placement: which block of the global tensor each rank holds.
        sum_axes: axes its gradient has still to be summed over after backward (plain data parallelism).
        tie: a name shared by parameters that are one tensor of the model; empty for the rest.
        only_at: axes whose ranks have different parameters (stages of a pipeline), with the coordinates that have this one.
        own_sum_axes: ``sum_axes`` belongs to this parameter: it is split over axes of the batch (experts), or sees only some of a
            rank's tokens.
    """

    mesh: Mesh
    placement: Placement
    sum_axes: tuple[str, ...] = ()
    tie: str = ""
    only_at: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    own_sum_axes: bool = False


def annotate(parameter: Tensor, meta: ParameterMeta) -> None:
    """Attach metadata to a parameter or buffer."""
    setattr(parameter, _ATTRIBUTE, meta)


def metadata(parameter: Tensor) -> ParameterMeta | None:
    """Return the metadata of a parameter, None for one that no package has placed (it is replicated everywhere)."""
    return getattr(parameter, _ATTRIBUTE, None)


def metadata_on(parameter: Tensor, mesh: Mesh) -> ParameterMeta:
    """Return the metadata of a parameter; if it has none, metadata that say it is replicated over ``mesh``."""
    found = metadata(parameter)
    if found is not None:
        return found
    shape = tuple(parameter.shape)
    return ParameterMeta(mesh=mesh, placement=Placement(shape=shape, axes=((),) * len(shape)))


def copy_parameter_hooks(before: Tensor, now: Tensor) -> None:
    """Register on the parameter ``now`` the hooks of the one that it replaces.

    A hook then sees this rank's part of the gradient: from its rows, for its block. Handles of the hooks before do not remove
    these.

    Args:
        before: with its ``register_hook`` and ``register_post_accumulate_grad_hook``.
        now: a leaf of autograd, without hooks yet.
    """
    for hook in (getattr(before, "_backward_hooks", None) or {}).values():
        now.register_hook(hook)
    for hook in (getattr(before, "_post_accumulate_grad_hooks", None) or {}).values():
        now.register_post_accumulate_grad_hook(hook)


_WRAPPED = "_orig_mod"  # torch.compile's name for the wrapped module


def uncompiled_name(name: str) -> str:
    """Return a parameter's name in the model as written.

    >>> uncompiled_name("blocks.0._orig_mod.up.weight")
    'blocks.0.up.weight'
    """
    return ".".join(part for part in name.split(".") if part != _WRAPPED) if _WRAPPED in name else name


def _single(tensors: Sequence[Tensor]) -> Tensor:
    (tensor,) = tensors
    return tensor


class StoredValue(NamedTuple):
    """The tensors that a value is stored in, not copied: they change when the value does.

    Attributes:
        tensors: on any device.
        whole: makes the value of them, or of copies of them on another device.
    """

    tensors: tuple[Tensor, ...]
    whole: Callable[[Sequence[Tensor]], Tensor] = _single

    @property
    def is_plain(self) -> bool:
        """True if the value is the single tensor, so that views of it are views of that tensor."""
        return self.whole is _single

    def made(self) -> Tensor:
        """Return the current value."""
        return self.whole(self.tensors)
