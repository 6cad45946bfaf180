"""Costs of every stage's actions: time in seconds or any other unit, and the activations that they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import isfinite

from meshfold.pipeline.errors import ScheduleError
from meshfold.pipeline.scheduling.actions import Op

Number = float | Sequence[float]
"""one number for all stages, or one for every stage"""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Time and memory of every stage; a single number stands for all stages.

    Attributes:
        forward: time of F.
        backward_input: time of B, the gradient of the stage's input.
        backward_weight: time of W, the gradient of the stage's weights.
        send: transfer time between stage s and s + 1, in either direction; one number for each of the
            stages - 1 borders. It overlaps with compute, and stages of one rank need none.
        backward: time of BW, both gradients at once; None: the sum of both.
        activation: memory that a stage holds for one micro-batch from the start of F, in any unit.
        kept: share of it that is still held between the end of B and the end of W, from 0 to 1. In arXiv 2401.10241,
            Table 1, this is M_W / M_B = 32 sbh / sb(34 h + 5 a s).
    """

    forward: Number = 1.0
    backward_input: Number = 1.0
    backward_weight: Number = 1.0
    send: Number = 0.0
    backward: Number | None = None
    activation: Number = 1.0
    kept: Number = 1.0

    def for_stages(self, stages: int) -> StageCosts:
        """Return one number for every stage and border.

        Raises:
            ScheduleError: for a negative or infinite number, a share above 1, or a list of another length.
        """
        read = {
            field.name: _spread(field.name, getattr(self, field.name), stages)
            for field in fields(self)
            if getattr(self, field.name) is not None
        }
        fused = read.get("backward") or tuple(
            b + w for b, w in zip(read["backward_input"], read["backward_weight"], strict=True)
        )
        durations = (
            {Op.F: f, Op.B: b, Op.W: w, Op.BW: bw}
            for f, b, w, bw in zip(read["forward"], read["backward_input"], read["backward_weight"], fused, strict=True)
        )
        return StageCosts(tuple(durations), read["send"], read["activation"], read["kept"])

    def finer(self, chunks: int) -> Costs:
        """Return the costs of the same model with every stage cut into ``chunks`` equal ones; messages stay as large.

        Raises:
            ScheduleError: if ``send`` differs between borders: the cost of the new borders is then unknown.
        """
        if not isinstance(self.send, int | float):
            raise ScheduleError("send differs between stage borders: measure the finer cut, or give one number.")

        def cut(value: Number) -> Number:
            if isinstance(value, int | float):
                return value / chunks
            return [one / chunks for one in value for _ in range(chunks)]

        kept = self.kept
        if not isinstance(kept, int | float):
            kept = [one for one in kept for _ in range(chunks)]
        return Costs(
            forward=cut(self.forward),
            backward_input=cut(self.backward_input),
            backward_weight=cut(self.backward_weight),
            send=self.send,
            backward=None if self.backward is None else cut(self.backward),
            activation=cut(self.activation),
            kept=kept,
        )

    @property
    def stages(self) -> int | None:
        """Number of stages that the lists are for; None if all are single numbers."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not isinstance(value, int | float):
                return len(value) + (field.name == "send")
        return None


@dataclass(frozen=True)
class StageCosts:
    """:class:`Costs` with one number for every stage: durations by operation, borders, activations, shares kept."""

    durations: tuple[dict[Op, float], ...]
    send: tuple[float, ...]
    activation: tuple[float, ...]
    kept: tuple[float, ...]


def _spread(name: str, value: Number, stages: int) -> tuple[float, ...]:
    count = max(stages - 1, 0) if name == "send" else stages
    if isinstance(value, int | float):
        numbers = (float(value),) * count
    else:
        numbers = tuple(float(one) for one in value)
        if len(numbers) != count:
            what = "borders between stages" if name == "send" else "stages"
            raise ScheduleError(
                f"{name} has {len(numbers)} numbers and there are {count} {what}. Give one for each, or a single number."
            )
    limit = 1.0 if name == "kept" else float("inf")
    wrong = [one for one in numbers if not (isfinite(one) and 0 <= one <= limit)]
    if wrong:
        between = "from 0 to 1" if name == "kept" else "not negative, and finite"
        raise ScheduleError(f"{name} holds {wrong[0]}. Give numbers that are {between}.")
    return numbers
