"""The way out: one loss from those of the ranks, or outputs gathered along the tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from meshfold.engine.sequence.incoming import Forward
from meshfold.mesh import Mesh, SpecError
from meshfold.mesh.collectives import gather, gather_blocks, scatter_sums
from meshfold.mesh.model_io import ShardedOutput, lazy_gather, map_tensors
from meshfold.sequence import sequence_mode


class Outgoing:
    """Makes what one process would have returned of what each rank's model has."""

    def __init__(self, mesh: Mesh, mode: str | Callable[..., object], written: str) -> None:
        """Args:
        mesh, mode: how sequences are dealt.
        written: the spec, for messages.
        """
        self._mesh, self._axes, self._written = mesh, sequence_mode(mode, mesh).axes, written

    def give(self, output: Any, now: Forward) -> Any:
        """A model's output of whole sequences. Beside a loss, tensors are put together when somebody reads them.

        Raises:
            SpecError: for an output that has no loss, or tensors that do not lie along the tokens.
        """
        if now.share is None:
            return map_tensors(output, lambda _, value: self._whole(value, now), deep=True)
        share, place = now.share, _place_of_loss(output)
        if place is None:
            self._refuse(f"the model was given labels and returned {type(output).__name__} without a loss")
        return map_tensors(
            output,
            lambda name, value: self._loss(value, share) if name == place else self._beside(name, value, now),
        )

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

    def _beside(self, name: str, value: Tensor, now: Forward) -> Tensor:
        """An output beside the loss: one along the tokens is put together when somebody reads it."""
        dealing, rows, mesh, axes = now.dealing, now.rows, self._mesh, self._axes
        along = value.dim() > 1 and value.shape[:2] == (rows, dealing.local)
        if value.is_meta or not (along or (value.dim() > 1 and value.shape[0] == rows * dealing.local)):
            return value
        inner = value.shape[2:] if along else value.shape[1:]
        shape = (rows, dealing.length, *inner) if along else (rows * dealing.length, *inner)

        def whole(piece: Tensor) -> Tensor:
            local = piece.reshape(rows, dealing.local, *inner)
            return dealing.join(gather_blocks(local, mesh, 1, axes), 1).reshape(shape)

        def piece(grad: Tensor) -> Tensor:
            rows_of_all = grad.reshape(rows, dealing.length, *inner)
            dealt = torch.cat([dealing.shard(rows_of_all, rank, 1) for rank in range(dealing.ranks)], 1)
            return scatter_sums(dealt, mesh, 1, axes).reshape(value.shape)

        return lazy_gather(
            value, ShardedOutput(what=name, mesh=mesh, axes=axes, shape=shape, whole=whole, piece=piece)
        )


def _place_of_loss(output: Any) -> str | None:
    """The name under which a model's output has its loss."""
    if isinstance(output, Tensor):
        return "output"
    if isinstance(output, tuple) and not hasattr(output, "_fields"):
        return "output[0]" if output and isinstance(output[0], Tensor) else None
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return "output.loss" if isinstance(loss, Tensor) else None
