"""The parameters of one chunk, as a model sees them: with values while the chunk is gathered, else without elements.

What a user's own code writes to them and the shard would not get is refused (:mod:`meshfold.mesh.parameters.weight_writes`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshfold.mesh.parameters import (
    WeightWriteError,
    give,
    refuse,
    remedy,
    settle,
    unwatch,
    was_written,
    watch,
)

Matrices = dict[tuple[torch.dtype, tuple[int, ...]], Tensor]
"""Matrices of one value, by dtype and shape"""


class ChunkParameters:
    """Parameters that are given values, and released."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], names: Sequence[str], shapes: Sequence[torch.Size], nothing: Tensor
    ) -> None:
        """Args:
        parameters: of a model.
        names: theirs, for messages.
        shapes: theirs, while they have values.
        nothing: an empty tensor of their dtype and device.
        """
        self._parameters, self._names, self._shapes = list(parameters), list(names), list(shapes)
        self._nothing = nothing

    def show(self, views: Sequence[Tensor], *, resident: bool) -> None:
        """Give each parameter its values; ``resident``: they may be written to, and :meth:`written` says so.

        Raises:
            WeightWriteError: if one was written to since it was released, or :meth:`refuse_old` was called.
        """
        self._refuse_written("while its values were not there")
        for parameter, view in zip(self._parameters, views, strict=True):
            give(parameter, view)
            if resident:
                watch(parameter)
            else:
                settle(parameter)

    def show_all(self, value: Tensor, matrices: Matrices | None = None) -> None:
        """Give each parameter its shape, with one value for all elements, which cannot be written to.

        Args:
            value: one element.
            matrices: of it, which parameters share that stack some: grouped products want strides. None: no product is made.
        """
        for parameter, shape in zip(self._parameters, self._shapes, strict=True):
            seen = value
            if matrices is not None and len(shape) > 2:
                key = value.dtype, tuple(shape[-2:])
                seen = matrices[key] = matrices.get(key, value.expand(key[1]).contiguous())
            give(parameter, seen.expand(shape))
            settle(parameter)

    def release(self) -> None:
        """Take all elements away.

        Raises:
            WeightWriteError: if one was written to since it was shown.
        """
        try:
            self._refuse_written("while it was gathered")
        finally:
            for parameter, name in zip(self._parameters, self._names, strict=True):
                refuse(parameter, name, _RELEASED, nothing=self._nothing)

    def refuse_old(self) -> None:
        """Refuse uses of values that a pending step replaces."""
        for parameter, name in zip(self._parameters, self._names, strict=True):
            refuse(parameter, name, _OLD)

    def written(self) -> dict[str, nn.Parameter]:
        """Return the parameters that may have been written to since they were shown, by name, and settle them."""
        found = {name: each for name, each in zip(self._names, self._parameters, strict=True) if was_written(each)}
        for parameter in found.values():
            settle(parameter)
        return found

    def unwatch(self) -> None:
        """Make those with values torch's own again."""
        for parameter in self._parameters:
            if parameter.shape.numel():
                unwatch(parameter)

    def _refuse_written(self, when: str) -> None:
        name = next(iter(self.written()), None)
        if name is not None:
            raise WeightWriteError(
                f"{name!r} was changed in place {when}, and the change is lost. {remedy(name)}. What a forward changes "
                "is a buffer (register_buffer). Without the host, stages 1 and 2 keep parameters where they can be changed"
            )


_RELEASED = (
    "which has no elements now: under zero stage 3 a parameter exists only while its module runs. In a forward, move the "
    "computation into the module that has the parameter, or tie the parameter"
)
_OLD = "whose optimizer step still runs on the host: its values are those before the step"
