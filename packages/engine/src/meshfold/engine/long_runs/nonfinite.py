"""``Engine(nonfinite=...)``: what is done about a loss or a gradient that is nan or infinite, and finding where it arose.

The norm of the gradient is looked at before the optimizer steps. It is the same number on every rank, and so is the
loss, so all ranks decide alike. Nothing else is done while all is well. When it is not, the micro-steps since the last
step are repeated, with the same batches, weights and random numbers, and this time every module is looked at.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, get_args

from torch import Tensor

from meshfold.engine.errors import NonFiniteError
from meshfold.engine.long_runs.provenance import Finding
from meshfold.mesh import SpecError, did_you_mean

if TYPE_CHECKING:
    from meshfold.engine.batches.batch import Batch

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


class MicroStep(NamedTuple):
    """A micro-step of ``train_step`` that can be repeated.

    Attributes:
        number: counted over the whole run.
        work: its batch.
        loss: its global loss.
    """

    number: int
    work: Batch
    loss: Tensor


class Replay(Protocol):
    """A function that repeats micro-steps and returns what was not finite first."""

    def __call__(self, micro_steps: Sequence[MicroStep], *, keep: bool) -> Finding | None:
        """``keep``: afterwards the gradients are complete, as they were."""


class NonFiniteGuard:
    """Looks at every accumulation before the optimizer steps.

    Attributes:
        finding: where the last one that was not finite arose.
    """

    def __init__(self, mode: Mode | None, *, says: bool) -> None:
        """Args:
        mode: what to do; None: nothing is looked at.
        says: this rank prints the warnings.
        """
        self._mode, self._says = mode, says
        self._seen: list[MicroStep] = []
        self._known = False
        self.finding: Finding | None = None

    def saw(self, number: int, work: Batch, loss: Tensor) -> None:
        """Note a micro-step of ``train_step``: its number, its batch and its global loss."""
        if self._mode is not None:
            self._seen.append(MicroStep(number, work, loss))

    def forget(self) -> None:
        """Forget the micro-steps: the accumulation is over."""
        self._seen.clear()

    def refuses(
        self, norm: Tensor, *, step: int, scaled: bool, replay: Replay, forget: Callable[[], None]
    ) -> bool:
        """Return whether the step must be left out. Under fp16 a gradient that overflows is the loss scale's business.

        Args:
            norm: of the gradient.
            step: number of the step.
            scaled: under fp16.
            replay: repeats the step's micro-steps.
            forget: releases its gradients.

        Raises:
            NonFiniteError: in mode ``"error"``, on every rank, with what was found.
        """
        mode = self._mode
        if mode is None:
            return False
        loss = next((seen.loss for seen in self._seen if not math.isfinite(seen.loss)), None)
        if loss is None and (scaled or math.isfinite(norm)):
            self._known = False
            return False
        what = f"the loss is {float(loss)}" if loss is not None else f"the gradient's norm is {float(norm)}"
        if mode == "report" and self._known:  # nan propagates: the step before reported it
            return False
        self._known = True
        self.finding = replay(self._seen, keep=mode == "report") if self._seen else None
        found = f"step {step}: {what}. {self.finding or _OWN_LOOP}"
        if mode == "error":
            forget()
            raise NonFiniteError(
                f"{found}\nNothing was stepped: the weights are those of before. A smaller learning rate, clip_grad_norm or "
                "another precision may help; Engine(..., nonfinite='skip') leaves such steps out"
            )
        if self._says:
            end = " The step is left out" if mode == "skip" else ""
            print(f"warning: {found}{end}", file=sys.stderr, flush=True)
        return mode == "skip"


_OWN_LOOP = (
    "Where it arose is looked for in micro-steps of train_step; this one was a loop of one's own: "
    "torch.autograd.detect_anomaly() finds the operation"
)
