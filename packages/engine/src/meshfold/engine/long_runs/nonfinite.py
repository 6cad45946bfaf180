"""``Engine(nonfinite=...)``: what is done about a loss or a gradient that is nan or infinite, and finding where it arose.

The norm of the gradient is looked at before the optimizer steps. It is the same number on every rank, and so is the
loss, so all ranks decide alike. Nothing else is done while all is well. When it is not, the micro-steps since the last
step are repeated, with the same batches, weights and random numbers, and this time every module is looked at.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from meshfold.engine.errors import NonFiniteError
from meshfold.engine.long_runs.provenance import Finding, first_of_all, looked_at
from meshfold.mesh import SpecError, did_you_mean

if TYPE_CHECKING:
    from meshfold.engine.batches.batch import Batch
    from meshfold.engine.engine import Engine

Mode = Literal["error", "skip", "report"]


def check_mode(value: object) -> Mode | None:
    """Raises:
    SpecError: for anything that is no mode.
    """
    known = get_args(Mode)
    if value is None:
        return None
    if value not in known:
        raise SpecError(
            f"nonfinite={value!r}:{did_you_mean(str(value), known)} Known: 'error' (raise), 'skip' (leave the step out), "
            "'report' (say so, and step), None (do not look)"
        )
    return value  # type: ignore[return-value]


class NonFiniteGuard:
    """Looks at every accumulation before the optimizer steps.

    Attributes:
        finding: of the last one that was not finite: where it arose.
    """

    def __init__(self, mode: Mode | None) -> None:
        """Args:
        mode: what to do; None: nothing is looked at.
        """
        self._mode = mode
        self._seen: list[tuple[int, Batch, Tensor]] = []
        self._looking = self._known = False
        self.finding: Finding | None = None

    def saw(self, micro_step: int, work: Batch, loss: Tensor) -> None:
        """A micro-step of ``train_step``: its number, its batch and its global loss."""
        if self._mode is not None and not self._looking:
            self._seen.append((micro_step, work, loss))

    def forget(self) -> None:
        """The accumulation is over."""
        if not self._looking:
            self._seen.clear()

    def refuses(self, engine: Engine, norm: Tensor) -> bool:
        """Whether the step must be left out. Under fp16 a gradient that overflows is the loss scale's business.

        Raises:
            NonFiniteError: in mode ``"error"``, on every rank, with what was found.
        """
        mode = self._mode
        if mode is None:
            return False
        loss = next((value for _, _, value in self._seen if not math.isfinite(value)), None)
        scaled = engine._scaler.moves
        if loss is None and (scaled or math.isfinite(norm)):
            self._known = False
            return False
        what = f"the loss is {float(loss)}" if loss is not None else f"the gradient's norm is {float(norm)}"
        place = f"step {engine.steps + engine.skipped_steps + 1}: {what}"
        if mode == "report" and self._known:  # it was said of the step before: nan begets nan
            return False
        self._known = True
        self.finding = self._look(engine) if self._seen else None
        found = f"{place}. {self.finding or _OWN_LOOP}"
        if mode == "error":
            engine.zero_grad()
            raise NonFiniteError(
                f"{found}\nNothing was stepped: the weights are those of before. A smaller learning rate, clip_grad_norm or "
                "another precision may help; Engine(..., nonfinite='skip') leaves such steps out"
            )
        if engine.mesh.rank == 0:
            end = " The step is left out" if mode == "skip" else ""
            print(f"warning: {found}{end}", file=sys.stderr, flush=True)
        return mode == "skip"

    def _look(self, engine: Engine) -> Finding | None:
        """Repeat the micro-steps, with an eye on every module; gradients are as they were, then."""
        self._looking = True
        now, place = engine.micro_step, engine._gradients.place
        engine._gradients.forget()
        mine: list[Finding] = []
        try:
            for number, (micro_step, work, _) in enumerate(self._seen):
                engine.micro_step = micro_step
                shares = engine._forward.shares(work)
                with looked_at(engine, work, micro_step, mine):
                    last = number == len(self._seen) - 1
                    loss = engine._forward_backward(work, shares, last=last)
                if not torch.isfinite(loss) and (not mine or mine[0].phase == "backward"):
                    mine[:] = [Finding.of_loss(micro_step, engine.mesh.rank)]  # from which the gradients come
        finally:
            engine.micro_step, engine._gradients.place = now, place
            self._looking = False
        found = first_of_all(mine, engine)
        if self._mode == "report":
            engine._states.finish(1.0 / engine._scaler.scale)
            engine._norm = engine._clip.apply(engine._states)
        return found


_OWN_LOOP = (
    "Where it arose is looked for in micro-steps of train_step; this one was a loop of one's own: "
    "torch.autograd.detect_anomaly() finds the operation"
)
