"""Costs of a layout for any number of rows and blocks, from micro-steps of a shortened model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from meshfold.mesh import ParallelSpec
from meshfold.planner.clock import Work
from meshfold.planner.estimates import Memory
from meshfold.planner.suggestions.shape import Shape

Message = tuple[str, str, tuple[str, ...], bool]
"""Phase, kind, axes and ``of_weights`` of messages."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A micro-step, or a part of the model in it.

    Attributes:
        forward: operators of it.
        backward: the same.
        messages: bytes and calls.
        saved: bytes kept for backward.
        stream: bytes of a block's input: what recomputation keeps, and what stages send.
        inside: bytes alive at most while blocks of the traced model compute, parameters and gradients apart.
        outside: the same while its other parts do; 0 where nobody looked.
    """

    forward: Work
    backward: Work
    messages: Mapping[Message, tuple[float, int]]
    saved: float
    stream: float
    inside: float = 0.0
    outside: float = 0.0

    def minus(self, other: Step) -> Step:
        """Return what this has more than another; ``stream`` and what is alive are this one's."""
        sent = {
            key: (size - other.messages.get(key, (0.0, 0))[0], calls - other.messages.get(key, (0.0, 0))[1])
            for key, (size, calls) in self.messages.items()
        }
        return Step(
            forward=self.forward.minus(other.forward),
            backward=self.backward.minus(other.backward),
            messages=sent,
            saved=self.saved - other.saved,
            stream=self.stream,
            inside=self.inside,
            outside=self.outside,
        )


@dataclass(frozen=True, kw_only=True)
class Part:
    """Costs of a block, or of all else.

    Attributes:
        steps: by the rows of a micro-step, ascending; nobody takes the gradients, as where chunks do.
        summed: what a micro-step has more whose gradients are added up for an optimizer step, without ``zero``.
        memory: of parameters and their state; activations are 0.
        elements: of parameters.
        updated: trainable parameters.
        unit: a batch is padded to a multiple of this many rows.
    """

    steps: Mapping[int, Step]
    summed: Step
    memory: Memory
    elements: int
    updated: int = 0
    unit: int = 1

    def at(self, rows: float, number: Callable[[Step], float]) -> float:
        """Return a number for any rows: measured, or on the line through the two nearest measured ones."""
        known = list(self.steps)
        rows = self.unit * math.ceil(rows / self.unit) if self.unit > 1 else rows
        if rows in self.steps:
            return number(self.steps[int(rows)])
        if len(known) == 1:
            return number(self.steps[known[0]]) * rows / known[0]
        above = next((place for place, size in enumerate(known) if size > rows), len(known) - 1)
        low, high = known[max(0, above - 1)], known[max(1, above)]
        first, second = number(self.steps[low]), number(self.steps[high])
        return first + (second - first) * (rows - low) / (high - low)

    def minus(self, other: Part) -> Part:
        """Return what this has more than another."""
        mine, theirs = self.memory, other.memory
        return Part(
            steps={rows: step.minus(other.steps[rows]) for rows, step in self.steps.items()},
            summed=self.summed.minus(other.summed),
            memory=Memory(
                parameters=mine.parameters - theirs.parameters,
                masters=mine.masters - theirs.masters,
                gradients=mine.gradients - theirs.gradients,
                optimizer=mine.optimizer - theirs.optimizer,
                activations=0,
            ),
            elements=self.elements - other.elements,
            updated=self.updated - other.updated,
            unit=self.unit,
        )


@dataclass(frozen=True, kw_only=True)
class Alive:
    """Bytes of a micro-step.

    Attributes:
        kept: of a block, for its backward.
        stream: of its input.
        rest: kept for backward by all else.
        inside: alive at most while the block of a model with a single one computes.
        outside: the same while all else does.
    """

    kept: float
    stream: float
    rest: float
    inside: float
    outside: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Costs of a layout.

    Attributes:
        spec: the layout.
        shape: of the model.
        block: of one block.
        rest: of all else.
    """

    spec: ParallelSpec
    shape: Shape
    block: Part
    rest: Part
    _alive: dict[float, Alive] = field(default_factory=dict, repr=False)

    def alive(self, rows: float) -> Alive:
        """Return the bytes of a micro-step of some rows."""
        if rows not in self._alive:
            block, rest = self.block, self.rest
            self._alive[rows] = Alive(
                kept=block.at(rows, lambda step: step.saved),
                stream=block.at(rows, lambda step: step.stream),
                rest=max(0.0, rest.at(rows, lambda step: step.saved)),
                inside=rest.at(rows, lambda step: step.inside),
                outside=rest.at(rows, lambda step: step.outside),
            )
        return self._alive[rows]

    def memory(self, blocks: float) -> Memory:
        """Return the memory of the parameters and their state, with this many blocks."""
        block, rest = self.block.memory, self.rest.memory
        return Memory(
            parameters=rest.parameters + round(blocks * block.parameters),
            masters=rest.masters + round(blocks * block.masters),
            gradients=rest.gradients + round(blocks * block.gradients),
            optimizer=rest.optimizer + round(blocks * block.optimizer),
            activations=0,
        )
