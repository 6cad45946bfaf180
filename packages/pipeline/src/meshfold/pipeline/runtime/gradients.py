"""Gradients of a step: tied ones are summed over their ranks, complete ones are passed on.

Each holder of a tied parameter, such as a head that shares the embedding's table, sends its gradient to every other holder. All of
them sum in the order of the ranks. They get the same bits, so equal copies stay equal if the optimizer treats them equally.
Gradients of a step's micro-batches are collected in float32 or wider as they arrive, before anything else reads ``.grad``.
Their sum is then added as one gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from meshfold.mesh import Transfer
from meshfold.mesh.parameters import accumulate_grad
from meshfold.pipeline.runtime.executor import Channels
from meshfold.pipeline.runtime.partition import Partition, Tie


class TiedGradients:
    """The gradients of the parameters that this rank shares. Make it before others hook these parameters."""

    def __init__(self, ties: Sequence[Tie], parameters: Sequence[nn.Parameter], channels: Channels) -> None:
        self.ties, self.parameters, self._channels = ties, list(parameters), channels
        self._shapes = [parameter.shape for parameter in parameters]  # ZeRO stage 3 empties them between uses
        self._collected = _Collected()
        self._handles: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(self._collected.hook(place))
            for place, parameter in enumerate(self.parameters)
            if parameter.requires_grad
        ]

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Context manager for the actions of a step: collect new gradients separately, and leave ``.grad`` unchanged."""
        before = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        self._collected.begin()
        try:
            yield
        finally:
            self._collected.end()
            for parameter, gradient in zip(self.parameters, before, strict=True):
                parameter.grad = gradient

    def sum(self) -> None:
        """Add the sum over all holders to ``.grad`` after the step, as autograd would; all holders must call."""
        coming: list[list[tuple[int, Transfer]]] = []
        own: dict[int, Tensor] = {}
        trained = [place for place, parameter in enumerate(self.parameters) if parameter.requires_grad]
        here = self._channels.index
        for place in trained:
            found, parameter = self._collected.gradients.get(place), self.parameters[place]
            gradient = _zeros(parameter, self._shapes[place]) if found is None else found
            own[place] = gradient
            others = [rank for rank in self.ties[place].ranks if rank != here]
            for rank in others:
                self._channels.send(gradient, rank)
            coming.append([(rank, self._channels.receive(torch.empty_like(gradient), rank)) for rank in others])
        for place, transfers in zip(trained, coming, strict=True):
            parameter = self.parameters[place]
            parts = dict([(here, own[place]), *((rank, transfer.wait()) for rank, transfer in transfers)])
            total = _sum([parts[rank] for rank in sorted(parts)])
            accumulate_grad(parameter, total.to(parameter.dtype))
        self._channels.finish()
        self._collected.gradients.clear()

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()


class _Collected:
    """Gradients that have arrived, for hooks of parameters: it has none of them, since they have the hooks.

    Attributes:
        gradients: sums over micro-batches, by the parameter's place.
    """

    def __init__(self) -> None:
        self.gradients: dict[int, Tensor] = {}
        self._is_on = False

    def begin(self) -> None:
        """Collect from now on."""
        self.gradients.clear()
        self._is_on = True

    def end(self) -> None:
        """Leave later gradients unchanged."""
        self._is_on = False

    def hook(self, place: int) -> Callable[[Tensor], None]:
        """Return the hook of a parameter."""

        def arrive(parameter: Tensor) -> None:
            if not self._is_on or parameter.grad is None:
                return
            found, parameter.grad = parameter.grad, None
            if place in self.gradients:
                self.gradients[place].add_(found)
            else:
                self.gradients[place] = found.to(_wide(found)).contiguous()

        return arrive


def pairs(ties: Sequence[Tie]) -> set[tuple[int, int]]:
    """Return the pairs (source, target) of ranks that exchange messages."""
    return {(a, b) for tie in ties for a in tie.ranks for b in tie.ranks if a != b}


def _wide(gradient: Tensor) -> torch.dtype:
    return torch.promote_types(gradient.dtype, torch.float32)


def _zeros(parameter: Tensor, shape: torch.Size) -> Tensor:
    return torch.zeros(shape, dtype=_wide(parameter), device=parameter.device)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


Reduce = Callable[[Sequence[tuple[str, nn.Parameter]]], None]
"""called with the parameters, and their names, whose gradients are complete"""


class CompleteGradients:
    """Passes parameters on as soon as no other stage of this rank, and no other rank, adds to their gradients."""

    def __init__(self, partition: Partition, ties: TiedGradients, reduce: Reduce) -> None:
        """Args:
        partition: the model.
        ties: parameters that other ranks keep as well: complete once they have been summed.
        reduce: called with them.
        """
        self._partition, self._ties, self._reduce = partition, ties, reduce
        self._tied = {tie.name for tie in partition.ties}
        self._unfinished: set[int] = set()

    def begin(self) -> None:
        """Begin a step: no gradient is complete."""
        self._unfinished = set(self._partition.stages)

    def of_stage(self, stage: int) -> None:
        """Pass on gradients that are complete once all micro-batches of a stage have had their W."""
        self._unfinished.discard(stage)
        done = [
            (name, parameter)
            for name, parameter in self._partition.named_parameters()
            if stage in (stages := self._partition.users[name])
            and not stages & self._unfinished
            and name not in self._tied
        ]
        if done:
            self._reduce(done)

    def of_ties(self) -> None:
        """Pass on tied parameters, once their gradients are summed."""
        if self._ties.parameters:
            named = zip(self._ties.ties, self._ties.parameters, strict=True)
            self._reduce([(tie.name, parameter) for tie, parameter in named])
