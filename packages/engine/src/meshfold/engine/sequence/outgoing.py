"""The way out: one loss from those of the ranks, or outputs gathered along the tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from meshfold.engine.sequence.incoming import Forward
from meshfold.mesh import Mesh, SpecError
from meshfold.mesh.primitives import gather
from meshfold.sequence.modes import find


class Outgoing:
    """Makes what one process would have returned of what each rank's model has."""

    def __init__(self, mesh: Mesh, mode: str | Callable[..., object], written: str) -> None:
        """Args:
        mesh, mode: how sequences are dealt.
        written: the spec, for messages.
        """
        self._mesh, self._axes, self._written = mesh, find(mode, mesh).axes, written

    def give(self, output: Any, now: Forward) -> Any:
        """A model's output with its loss, or without labels all its tensors, of whole sequences.

        Raises:
            SpecError: for an output that has no loss, or tensors that do not lie along the tokens.
        """
        if now.share is None:
            return changed(output, lambda value: self._whole(value, now))
        if isinstance(output, Tensor):
            return self._loss(output, now.share)
        if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
            output["loss"] = self._loss(output["loss"], now.share)  # type: ignore[index]
        elif isinstance(output, tuple) and not hasattr(output, "_fields"):
            output = (self._loss(output[0], now.share), *output[1:])
        elif isinstance(getattr(output, "loss", None), Tensor):
            object.__setattr__(
                output, "loss", self._loss(output.loss, now.share)
            )  # it may be a frozen dataclass
        else:
            self._refuse(f"the model was given labels and returned {type(output).__name__} without a loss")
        return output

    def _refuse(self, why: str) -> NoReturn:
        raise SpecError(f"{self._written}: {why}")

    def _loss(self, mine: Tensor, share: Tensor) -> Tensor:
        """The mean over whole sequences from the means over each rank's tokens; the same on every rank of them."""
        if mine.dim():
            self._refuse(
                f"the model was given labels and returned a loss of shape {tuple(mine.shape)}: a mean is a scalar"
            )
        # Where nothing counts the mean is 0/0.
        part = torch.where(share > 0, mine.double() * share, 0.0)
        return gather(part.view(1), self._mesh, 0, self._axes).sum().to(mine.dtype)

    def _whole(self, value: Tensor, now: Forward) -> Tensor:
        local = now.dealing.local
        if value.dim() < 2 or value.shape[0] != now.rows or value.shape[1] != local:
            self._refuse(
                f"the model returned a tensor {list(value.shape)}, and where a sequence is split each rank's outputs have to lie "
                f"along its tokens, here [{now.rows}, {local}, ...], so that they can be put together"
            )
        return now.dealing.join(gather(value, self._mesh, 1, self._axes), 1)


def changed(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A model's output with its tensors changed: a tensor, a tuple or list, a mapping or a dataclass."""
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, tuple | list):
        parts = [changed(value, change) for value in output]
        return type(output)(*parts) if hasattr(output, "_fields") else type(output)(parts)
    if isinstance(output, Mapping):
        for name, value in output.items():
            if isinstance(value, Tensor | tuple | list):
                output[name] = changed(value, change)  # type: ignore[index]
    else:
        for name, value in getattr(output, "__dict__", {}).items():
            if isinstance(value, Tensor | tuple | list):
                object.__setattr__(output, name, changed(value, change))
    return output
