"""Rules for CUDA graphs under ``zero``: what graphs depend on, when a micro-step is captured, and why it runs eagerly."""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from meshfold.engine.captured_step import Counted, form_of
from meshfold.engine.model.mask_choice import masks_by_shape
from meshfold.engine.zero.random_draws import random_draws

if TYPE_CHECKING:
    from meshfold.engine.batches.batch import Batch
    from meshfold.engine.forward import Forward
    from meshfold.engine.model.recompute import RecomputedBlocks
    from meshfold.engine.zero.states import ZeroStates
    from meshfold.zero_gemini import BackwardRole

FEW_REPLAYS = 8
"""Graphs that were freed after fewer replays than this were hardly worth their capture: the next ones come later."""
MOST_WARM_UP = 64
"""Most micro-steps of a form before it is captured again."""

_WARMS_UP = "kernels and the order of moves are not known yet for this batch and placement"


@dataclass(kw_only=True)
class CaptureReport:
    """Report on the graphs of ``Engine(cuda_graph=True)`` under ``zero``.

    Attributes:
        captures: how often a micro-step was captured.
        replays: micro-steps that were replayed.
        graphs: graphs of the last captured micro-step.
        why_eager: why the last micro-step ran without graphs; empty if it did not.
    """

    captures: int = 0
    replays: int = 0
    graphs: int = 0
    why_eager: str = "no step was made yet"


class GraphKey(NamedTuple):
    """The facts that graphs depend on: with another key they are captured anew.

    Attributes:
        placement: of chunks, and which blocks recompute.
        form: of the batch.
        modules: addresses of the model's buffers, and which parameters are trained.
    """

    placement: Hashable
    form: Hashable
    modules: Hashable


class CaptureRules:
    """Judge of micro-steps: each is captured, replayed or run eagerly, and the report says why.

    Attributes:
        report: for the user.
        key: of the last micro-step; None before the first.
    """

    def __init__(
        self,
        forward: Forward,
        states: ZeroStates,
        model: nn.Module,
        blocks: RecomputedBlocks | None,
        *,
        warns: bool,
    ) -> None:
        """Args:
        forward: calls the model.
        states: have its chunks.
        model: whose micro-steps are captured.
        blocks: those that recompute; None if none does.
        warns: of what the user can change, once for each reason.
        """
        self.report = CaptureReport()
        self.key: GraphKey | None = None
        self._forward, self._states, self._model, self._blocks = forward, states, model, blocks
        self._modules = [*model.modules()]  # to find them takes 2 ms in a U-Net
        self._warm, self._wanted = 0, 1  # micro-steps of this key since the last change, and before a capture
        self._failed: dict[GraphKey | None, str] = {}
        self._draws: list[str] | None = None  # operators of the model that draw random numbers, if that is known
        self._warns = warns
        self._said: set[str] = set()

    # -- the course of micro-steps ------------------------------------------------------------------------------

    def key_of(self, work: Batch) -> GraphKey:
        """Return what the graphs of a batch depend on now."""
        states, gemini = self._states, self._states.gemini
        placement = (
            states.residency.moves,
            () if self._blocks is None else (self._blocks.kept, self._blocks.with_attention),
            tuple((each.parameters, each.state) for each in gemini.placements.values()),
            tuple(chunk.address for chunk in gemini.chunks),
        )
        modules = tuple(
            (
                *(0 if buffer is None else buffer.data_ptr() for buffer in module._buffers.values()),
                *(parameter is not None and parameter.requires_grad for parameter in module._parameters.values()),
            )
            for module in self._modules
        )
        return GraphKey(placement, form_of(work, self._modules), modules)

    def begin(self, key: GraphKey) -> None:
        """Begin to count the micro-steps of another key."""
        self.key, self._warm = key, 0

    def ran_eagerly(self) -> None:
        """Count a micro-step without graphs."""
        self._warm += 1

    def freed(self, replays: int | None, *, moves: bool) -> None:
        """Note that graphs were freed, so that the next ones come later if these were hardly used.

        Args:
            replays: how often they were replayed; None: there were none.
            moves: chunks move, so what was seen of steps before does not count.
        """
        if moves:
            self._wanted = 1
        elif replays is not None:
            self._wanted = min(MOST_WARM_UP, 2 * self._wanted) if replays < FEW_REPLAYS else 1
        if replays is not None:
            self._warm = 0

    # -- whether a micro-step can be captured -------------------------------------------------------------------

    def why_not(self, kind: BackwardRole, *, first: bool, captured: bool) -> str:
        """Return why this micro-step runs eagerly, as a clause; empty if it need not.

        Args:
            kind: role of its backward.
            first: it is the first of its optimizer step.
            captured: there are graphs of its key.
        """
        if kind == "final":
            return (
                "chunks are stepped while backward runs, because nothing is asked of all gradients together: with "
                "clip_grad_norm the step can be captured"
            )
        if kind != "last" or not first:
            return "gradients are accumulated over several backwards: set gradient_accumulation=1"
        if why := self._states.gemini.why_not_captured():
            return why
        if self.failure:
            return self.failure
        if self._states.residency.is_watching:
            return "the first steps are traced for the plan"
        return _WARMS_UP if not captured and self._warm < self._wanted else ""

    def why_draws(self, work: Batch, count: Tensor) -> str:
        """Return why blocks cannot repeat their forwards in a graph, as a clause: a forward that draws random numbers."""
        if self._blocks is None:
            return ""
        if self._draws is None:
            try:
                with masks_by_shape():
                    self._draws = random_draws(self._model, lambda: self._forward.loss(work, Counted(count)))
            except torch.OutOfMemoryError:
                self.fail(
                    "the forward that looks for random numbers runs without compiled code and does not fit into memory"
                )
                return self.failure
        if not self._draws:
            return ""
        return f"{self._draws[0]} draws random numbers, and blocks that recompute could not draw them again"

    @property
    def failure(self) -> str:
        """Reason why a micro-step of this key could not be captured, as a clause; empty if none was tried in vain."""
        return self._failed.get(self.key, "")

    def fail(self, why: str) -> None:
        """Run micro-steps of this key eagerly from now on."""
        self._failed[self.key] = why

    def say(self, why: str) -> None:
        """Report why a micro-step runs eagerly; warn of what the user can change, once."""
        self.report.why_eager = why
        passes = not why or why == _WARMS_UP or self._states.residency.is_watching or not self._warns
        if passes or why in self._said:
            return
        self._said.add(why)
        warnings.warn(f"cuda_graph=True: steps run without graphs now: {why}", stacklevel=6)
