"""The gradients of all chunks: taken up as autograd makes them, reduced in order, measured, handed to the optimizer.

Backward comes to the last chunk first, and chunks are reduced in that order on every rank, whatever order gradients come
in: a chunk that is ready early waits for those behind it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from meshfold.mesh import Group, all_reduce
from meshfold.mesh.norms import largest_of
from meshfold.zero_gemini.chunk import Chunk
from meshfold.zero_gemini.gradients import ChunkGradient
from meshfold.zero_gemini.norm import combine


class GradientFlow:
    """Hooks on parameters, and the order of reductions.

    Attributes:
        takes: whether gradients count that come now; those that come while it is False are dropped.
        last: whether the backward that runs, or comes, is the last of an accumulation.
    """

    def __init__(self, gradients: dict[Chunk, ChunkGradient], device: torch.device) -> None:
        """Args:
        gradients: of every chunk that is trained, in order of registration.
        device: where the model computes.
        """
        self._gradients, self._device = gradients, device
        self.takes = self.last = True
        self._waiting = [*reversed(gradients.values())]  # in the order of reductions
        self._next = 0  # how many of them were reduced in this backward
        self._under_way: deque[ChunkGradient] = deque()
        self._in_backward = False
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._arrival(gradient, place))
            for chunk, gradient in gradients.items()
            for place, parameter in enumerate(chunk.parameters)
        ]

    @property
    def was_broken_off(self) -> bool:
        """Whether a backward began and did not end."""
        return self._in_backward

    # -- while backward runs ------------------------------------------------------------------------------------

    def _arrival(self, gradient: ChunkGradient, place: int) -> Callable[[Tensor], None]:
        def arrive(parameter: Tensor) -> None:
            if not self.takes:
                parameter.grad = None
            if parameter.grad is not None:
                if not self._in_backward:
                    self._in_backward = True
                    torch.autograd.Variable._execution_engine.queue_callback(self._ended)
                gradient.add(place, parameter.grad)
                parameter.grad = None
                self._reduce_ready()

        return arrive

    def _reduce_ready(self) -> None:
        while self._next < len(self._waiting) and self._waiting[self._next].is_full:
            self._reduce(self._waiting[self._next])
            self._next += 1

    def _reduce(self, gradient: ChunkGradient) -> None:
        """Start one reduction, and end the one before the last: it is over by now, and what it read can go."""
        gradient.reduce(last=self.last)
        self._under_way.append(gradient)
        if len(self._under_way) > 2:
            self._under_way.popleft().collect()

    def _ended(self) -> None:
        for gradient in self._waiting[self._next :]:
            self._reduce(gradient)
        self._reset()
        for gradient in self._gradients.values():
            gradient.begin()

    def _reset(self) -> None:
        self._under_way.clear()
        self._next, self._in_backward = 0, False

    # -- afterwards ---------------------------------------------------------------------------------------------

    def reduce_rest(self) -> None:
        """Reduce what backwards that were not the last have left. All ranks must call."""
        for gradient in self._waiting:
            gradient.reduce(last=True)

    def shards(self) -> dict[Chunk, Tensor]:
        """The complete gradient of every chunk, at home."""
        return {chunk: gradient.finish() for chunk, gradient in self._gradients.items()}

    def norm(
        self, norm_type: float, measure: Callable[[Chunk, float, Tensor], Tensor], everyone: Group
    ) -> Tensor:
        """The norm of the whole model's gradient: float64, the same on every rank.

        Args:
            norm_type: which.
            measure: a rank's part of it, of a chunk's shard.
            everyone: all ranks.
        """
        sums = []
        for chunk, gradient in self._gradients.items():
            shard = gradient.finish()
            known = gradient.measured if norm_type == 2.0 else None
            sums.append(measure(chunk, norm_type, shard) if known is None else known)
        total = combine(sums, norm_type, self._device)
        if math.isinf(norm_type):
            return largest_of(total, everyone)
        return all_reduce(total, everyone) ** (1.0 / norm_type)

    def used(self) -> set[str]:
        """Names of the parameters that had a gradient on some rank. All ranks must call."""
        used: set[str] = set()
        for chunk, gradient in self._gradients.items():
            names = chunk.spec.names
            if chunk.group.size > 1:
                flags = torch.zeros(len(names), device=self._device)
                for place in gradient.used:
                    flags[place] = 1.0
                flags = all_reduce(flags, chunk.group, "max")
                if len(gradient.used) < len(names):
                    used.update(names[place] for place in flags.nonzero().flatten().tolist())
                    continue
            used.update(names[place] for place in gradient.used)
        return used

    def forget(self) -> None:
        """Let all gradients go."""
        for gradient in self._gradients.values():
            gradient.clear()

    def abandon(self) -> None:
        """Forget a backward that raised in the middle, with all gradients so far."""
        self._reset()
        self.forget()

    def close(self) -> None:
        """Take the hooks off, and give all memory back."""
        for handle in self._handles:
            handle.remove()
        for gradient in self._gradients.values():
            gradient.close()
