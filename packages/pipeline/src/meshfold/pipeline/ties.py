"""Parameters that several ranks keep, such as a head that shares the embedding's table: their gradients are summed.

Every holder sends its own to every other and adds all in the order of the ranks, so all get the same bits, and copies
that were equal stay equal under any optimizer that treats them alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshfold.mesh import Transfer
from meshfold.pipeline.cut import Tie
from meshfold.pipeline.interpreter import Channels


class TiedGradients:
    """The gradients of one step of the parameters that this rank shares."""

    def __init__(self, ties: Sequence[Tie], parameters: Sequence[nn.Parameter], channels: Channels) -> None:
        """Put aside what was in ``.grad`` before the step: it is summed already."""
        self._ties, self._parameters, self._channels = ties, parameters, channels
        self._before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None

    def sum(self) -> None:
        """After the step: ``.grad`` is the sum over all holders, and what was put aside."""
        coming: list[list[tuple[int, Transfer]]] = []
        own = [torch.zeros_like(p) if p.grad is None else p.grad.contiguous() for p in self._parameters]
        here = self._channels.index
        for tie, gradient in zip(self._ties, own, strict=True):
            others = [rank for rank in tie.ranks if rank != here]
            for rank in others:
                self._channels.send(gradient, rank)
            coming.append(
                [(rank, self._channels.receive(torch.empty_like(gradient), rank)) for rank in others]
            )
        for parameter, before, gradient, transfers in zip(
            self._parameters, self._before, own, coming, strict=True
        ):
            parts = dict([(here, gradient), *((rank, transfer.wait()) for rank, transfer in transfers)])
            total = _sum([parts[rank] for rank in sorted(parts)])
            parameter.grad = total if before is None else before.add_(total)
        self._channels.finish()

    def restore(self) -> None:
        """After a step that was broken off: what there was before."""
        for parameter, before in zip(self._parameters, self._before, strict=True):
            parameter.grad = before


def pairs(ties: Sequence[Tie]) -> set[tuple[int, int]]:
    """Who sends to whom."""
    return {(a, b) for tie in ties for a in tie.ranks for b in tie.ranks if a != b}


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
