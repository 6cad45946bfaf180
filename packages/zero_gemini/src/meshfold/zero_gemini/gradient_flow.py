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
from meshfold.mesh.deferral import when_made
from meshfold.mesh.norms import largest_of
from meshfold.zero_gemini.backward import Backward
from meshfold.zero_gemini.chunk import Chunk
from meshfold.zero_gemini.early import EarlySteps
from meshfold.zero_gemini.errors import ChunkError
from meshfold.zero_gemini.gradients import ChunkGradient
from meshfold.zero_gemini.norm import combine
from meshfold.zero_gemini.runtime import Runtime, graph_task


class GradientFlow:
    """Hooks on parameters, and the order of reductions.

    Attributes:
        takes: whether gradients count that come now; those that come while it is False are dropped.
        kind: of the backward that runs, or comes.
    """

    def __init__(
        self,
        gradients: dict[Chunk, ChunkGradient],
        device: torch.device,
        runtime: Runtime,
        early: EarlySteps | None,
    ) -> None:
        """Args:
        gradients: of every chunk that is trained, in order of registration.
        device: where the model computes.
        runtime: knows what a backward has come to.
        early: steps chunks in a final backward; None if that cannot be.
        """
        self._gradients, self._device, self._runtime, self._early = gradients, device, runtime, early
        self.takes = True
        self.kind: Backward = "last"
        self._waiting = [*reversed(gradients.values())]  # in the order of reductions
        self._next = 0  # how many of them were reduced in this backward
        self._under_way: deque[ChunkGradient] = deque()
        self._in_parts: set[ChunkGradient] = set()  # of which some came in a backward inside of this one
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

    def expect(self, kind: Backward) -> None:
        """Before a backward; whose chunks are stepped in it where it is final and that can be."""
        self.kind = "last" if kind == "final" and self._early is None else kind
        if self.kind == "final" and self._early is not None:
            self._early.begin(self._waiting)

    # -- while backward runs ------------------------------------------------------------------------------------

    def _arrival(self, gradient: ChunkGradient, place: int) -> Callable[[Tensor], None]:
        def arrive(parameter: Tensor) -> None:
            found, parameter.grad = parameter.grad, None  # whatever happens: what stayed would be added to
            if self.takes and found is not None:
                if not self._in_backward:
                    self._in_backward = True
                    when_made(self._ended)
                if self._runtime.task not in (None, graph_task()):
                    self._in_parts.add(gradient)
                gradient.add(place, found)
                del found
                self._reduce_ready()

        return arrive

    def _reduce_ready(self) -> None:
        while self._next < len(self._waiting) and self._waiting[self._next].is_full:
            self._reduce(self._waiting[self._next])
            self._next += 1

    def _reduce(self, gradient: ChunkGradient) -> None:
        """Start one reduction, and end the one before the last: it is over by now, and what it read can go."""
        unsure = gradient in self._in_parts or self._runtime.is_unsure(gradient.chunk)
        if not gradient.is_full:  # the end of a backward, and perhaps of one inside of another
            unsure |= not self._runtime.is_over(gradient.chunk)
        gradient.reduce(self.kind, unsure=unsure)
        self._under_way.append(gradient)
        while len(self._under_way) > 2 or (self._under_way and not self._under_way[0].is_pending):
            self._collect(self._under_way.popleft())

    def _collect(self, gradient: ChunkGradient) -> None:
        gradient.collect()
        if self.kind == "final" and self._early is not None:
            self._early.offer(gradient)

    def _ended(self) -> None:
        for gradient in self._waiting[self._next :]:
            self._reduce(gradient)
        if self.kind == "final":
            while self._under_way:
                self._collect(self._under_way.popleft())
        self._reset()
        for gradient in self._gradients.values():
            gradient.begin()

    def _reset(self) -> None:
        self._under_way.clear()
        self._in_parts.clear()
        self._next, self._in_backward = 0, False

    # -- afterwards ---------------------------------------------------------------------------------------------

    def reduce_rest(self) -> None:
        """Reduce what backwards that were not the last have left. All ranks must call."""
        for gradient in self._waiting:
            gradient.reduce("last")

    def shards(self) -> dict[Chunk, Tensor]:
        """The complete gradient of every chunk, at home."""
        return {chunk: gradient.finish() for chunk, gradient in self._gradients.items()}

    @property
    def steps_early(self) -> bool:
        """Whether chunks are stepped in the backward that ran last."""
        return self.kind == "final"

    def complete(self) -> None:
        """After the backward: all gradients are there; of a final one all steps are made, or promised."""
        if self._early is not None and self.steps_early:
            self._early.finish(self._waiting)
        else:
            self.shards()

    def norm(
        self, norm_type: float, measure: Callable[[Chunk, float, Tensor], Tensor], everyone: Group
    ) -> Tensor:
        """The norm of the whole model's gradient: float64, the same on every rank.

        Args:
            norm_type: which.
            measure: a rank's part of it, of a chunk's shard.
            everyone: all ranks.

        Raises:
            ChunkError: for another one than 2, of gradients that were stepped with.
        """
        sums = []
        for chunk, gradient in self._gradients.items():
            if gradient.is_gone and norm_type != 2.0:
                raise ChunkError(
                    f"the {norm_type:g}-norm of gradients was asked for, and they were stepped with as they came: clip by it, or "
                    "say before the backward that it is not 'final'"
                )
            shard = None if gradient.is_gone else gradient.finish()
            known = gradient.measured if norm_type == 2.0 else None
            if known is None and shard is not None:
                known = measure(chunk, norm_type, shard)
            sums += [] if known is None else [known]
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
        if self._early is not None:
            self._early.check()
            self._early.forget()
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
        if self._early is not None:
            self._early.close()
