"""The train step: forward, loss, backward, clip, optimizer step, over the micro-steps of an accumulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshfold.engine.assembly.arguments import Arguments
from meshfold.engine.assembly.build import Built
from meshfold.engine.batches.sharding import randomness
from meshfold.engine.checkpoints.saving import Saver
from meshfold.engine.errors import TrainingError
from meshfold.engine.long_runs.nonfinite import Finding, MicroStep, NonFiniteGuard, NonFiniteSearch
from meshfold.engine.model.buffer_changes import BufferChanges
from meshfold.engine.model.pipelined_model import PipelinedModel
from meshfold.engine.precision import LossScaler
from meshfold.engine.states.accumulation import Accumulation
from meshfold.engine.step_metrics import StepMetrics, StepValues
from meshfold.mesh import all_reduce, collector_paused
from meshfold.mesh.recording import at_step

if TYPE_CHECKING:
    from meshfold.engine.batches.batch import Batch
    from meshfold.engine.batches.sharding import Shares
    from meshfold.engine.zero.capture_rules import CaptureReport
    from meshfold.zero_gemini import BackwardRole


class TrainStep:
    """Micro-steps and the optimizer steps that they add up to; :class:`meshfold.engine.Engine` is its public interface.

    Attributes:
        forward: calls the model on a batch.
        gradients: accumulated since the last optimizer step.
        scaler: scales the loss under fp16.
        clipping: clips the gradients before the optimizer steps.
        accumulation: micro-steps per optimizer step.
        needs_all_gradients: no parameter may be stepped before all gradients are complete.
        stages: runs the model under ``pipeline``; None without it.
        lr_scheduler: stepped after each optimizer step if ``steps_scheduler`` is True; or None.
        guard: checks for losses and gradients that are not finite.
        seed: of dropout.
        steps, micro_step, skipped_steps: see :class:`meshfold.engine.Engine`.
    """

    def __init__(self, built: Built, asked: Arguments, saver: Saver) -> None:
        """Args:
        built: the parts of the engine.
        asked: the arguments of the engine.
        saver: its background copies must finish before a step changes what they read.
        """
        self._model, self._world, self._states = built.part.model, built.world, built.states
        self.stages: PipelinedModel | None = built.part.pipelined
        self._captured, self._captured_zero = built.captured, built.captured_zero
        self._torch_dropout = built.part.torch_dropout
        self._changes = BufferChanges(built.part.model, built.world)
        self.forward, self._step_guard, self._saver = built.forward, built.step_guard, saver
        self.lr_scheduler, self.steps_scheduler = built.lr_scheduler, True
        self.scaler = LossScaler(asked.precision.scale, says=built.world.mesh.rank == 0)
        self.gradients = Accumulation(
            built.states,
            self.scaler,
            before_change=saver.before_change,
            stages=built.world.pipelined,
            weights=None if built.fp8 is None else built.fp8.weights,
        )
        self.clipping, self.needs_all_gradients = asked.clip, asked.looks_at_all
        self.guard = NonFiniteGuard(asked.nonfinite, says=built.world.mesh.rank == 0)
        self.accumulation, self.seed = asked.accumulation, asked.seed
        self._weight: float | None = None  # of a micro-step's loss in its optimizer step; None: 1 / accumulation

        self.steps = self.micro_step = self.skipped_steps = 0
        # Results of the last optimizer step.
        self._norm: Tensor | None = None
        optimizer = built.states.optimizer
        self._lr = 0.0 if optimizer is None else float(optimizer.param_groups[0]["lr"])
        self._skipped = False
        self._values: StepValues | None = None

    # -- a micro-step -----------------------------------------------------------------------------------------------

    @collector_paused()
    def run(self, batch: Any, *, steps: bool = True) -> None:
        """Run a micro-step on this data coordinate's batch; the last one of an accumulation steps the optimizer.

        Args:
            batch: arguments of the model.
            steps: False leaves the optimizer step to a later call of :meth:`finish`.

        Raises:
            SpecError: for a batch the model cannot be called with.
            TrainingError: without an optimizer, and where torch keeps no graph.
        """
        self.gradients.check_open()
        self.gradients.check_graph()
        at_step(self.steps + self.skipped_steps + 1)
        last = self.gradients.micro_steps == self.accumulation - 1
        work, shares = self.prepare(batch)
        loss = self._forward_backward(work, shares, last=last, shown=not (last and steps))
        loss = all_reduce(loss, self._world.data_group)
        self.guard.saw(self.micro_step, work, loss)
        self.micro_step += 1
        self.gradients.micro_steps += 1
        if last and steps:
            self.finish()
        self._values = self._values_now(loss, shares.total(), stepped=last)

    def prepare(self, batch: Any) -> tuple[Batch, Shares]:
        """Put the model in training mode, and return a batch on the device with its part of the global batch."""
        work = self.forward.prepare(batch)
        self.forward.train(work)
        return work, self.forward.shares(work)

    def loss_and_gradients(self, work: Batch, shares: Shares, backward: Callable[[Tensor], None]) -> Tensor:
        """Run forward and backward of a whole batch, and return this rank's share of the global loss.

        Args:
            work: the batch, on the device.
            shares: its part of the global batch.
            backward: called with this micro-step's part of the step's loss.
        """
        with self.forward.observed_step(), self.random(shares), self._changes.over_data():
            loss = self.forward.loss(work, shares)
            share = shares.weight()
            backward(loss * self._in_step(share))
        return loss.detach() * share

    def _forward_backward(
        self, work: Batch, shares: Shares, *, last: bool, shown: bool, replays: bool = True
    ) -> Tensor:
        """Accumulate a micro-step's gradient, and return this rank's share of the global loss.

        ``replays``: the micro-step may be a replay of a captured one.
        """
        if self.stages is not None:
            return self._through_stages(self.stages, work, shares, last=last, shown=shown)
        # If nothing else reads the gradients, the optimizer may step each one as soon as it is complete.
        kind: BackwardRole = "more" if not last else "last" if self.needs_all_gradients else "final"
        if self._captured_zero is not None:
            return self._captured_zero.run(
                work,
                shares,
                kind if replays else None,
                self.gradients,
                in_step=lambda share: self._in_step(share) * self.scaler.scale,
                eagerly=lambda: self._eagerly(work, shares, kind, shown=shown),
                relieve=self._relieve,
                shown=shown,
            )
        if self._captured is None or not replays:
            return self._eagerly(work, shares, kind, shown=shown)
        form = self._captured.form_to_replay(work)
        if form is None:
            with self._captured.warming_up():
                return self._eagerly(work, shares, kind, shown=shown)
        self.gradients.begin()
        share = shares.weight()
        with self.gradients.taking(kind, shown=shown):
            weight = self._in_step(share) * self.scaler.scale
            loss = self._captured.run(form, work, shares.count, weight, more=shown)
        return loss * share

    @property
    def capture(self) -> CaptureReport | None:
        """Report on graphs under ``zero``; None if none were asked for."""
        return None if self._captured_zero is None else self._captured_zero.report

    def _eagerly(self, work: Batch, shares: Shares, kind: BackwardRole, *, shown: bool) -> Tensor:
        while True:
            try:
                self.gradients.begin()
                return self.loss_and_gradients(
                    work, shares, lambda part: self.gradients.backward(part, kind, shown=shown)
                )
            except RuntimeError as error:
                self.gradients.break_off()
                if self.gradients.backwards or not self._states.can_relieve(error):
                    raise
            # Out of memory, but some can be freed. Done outside the except block, where the error would keep the graph alive.
            self._relieve()

    def _relieve(self) -> None:
        self._saver.before_change()  # relieve() moves chunks
        self._states.relieve()

    def _through_stages(
        self, stages: PipelinedModel, work: Batch, shares: Shares, *, last: bool, shown: bool
    ) -> Tensor:
        """Do the same with pipeline stages, which interleave forwards and backwards of micro-batches."""
        self.gradients.begin(anew=True)
        with self.random(shares):
            works, share = stages.look_ahead(work), shares.weight()
        taking = self.gradients.taking("last" if last else "more", shown=shown)
        with self.random(shares), self._changes.over_data(), self._changes.watching(len(works)), taking:
            return stages.step(works, self._in_step(share * self.scaler.scale)) * share

    def _in_step(self, share: Any) -> Any:
        """Return a micro-step's share of the loss, weighted as a part of its optimizer step."""
        return share / self.accumulation if self._weight is None else share * self._weight

    @contextmanager
    def accumulating(self, steps: int, weight: float | None) -> Iterator[None]:
        """Context manager: micro-steps inside belong to an optimizer step of ``steps`` micro-steps.

        Args:
            steps: number of micro-steps.
            weight: of a micro-step's mean loss in the loss of the step; None: 1 / steps.
        """
        before = self.accumulation, self._weight
        self.accumulation, self._weight = steps, weight
        try:
            yield
        finally:
            self.accumulation, self._weight = before

    def random(self, shares: Shares) -> AbstractContextManager[object]:
        """Context manager for a micro-step's dropout, which drops the same elements of the global batch under every spec."""
        return randomness(self.seed, self.micro_step, shares, self._world.device, torch_too=self._torch_dropout)

    # -- the parts of a micro-step, for the user's own training loop --------------------------------------------------

    @collector_paused()
    def output(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the model's output on this rank's inputs, in training mode."""
        work = self.forward.inputs(args, kwargs)
        self.forward.train(work, complete=False)
        if torch.is_grad_enabled():
            self.gradients.begin()
        with self.random(self.forward.shares(work)):
            output = self.forward.output_with_loss(work)
        self.micro_step += 1
        return output

    @collector_paused()
    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Add the gradient of a loss, which is a mean over this rank's own batch.

        Raises:
            SpecError: if the loss is not a scalar, or does not depend on parameters.
        """
        self.forward.check_loss(loss)
        self._step_guard.saw(loss)
        kind: BackwardRole = "last" if self.gradients.summed else "apart"
        self.gradients.backward(loss.double() / self._world.data_size, kind, retain_graph=retain_graph)

    # -- the optimizer's step ---------------------------------------------------------------------------------------

    @collector_paused()
    def finish(self) -> bool:
        """End an accumulation: unscale, clip, step optimizer and scheduler, and release the gradients.

        Returns:
            False if the step was skipped because its gradients overflowed or were not finite.

        Raises:
            TrainingError: if there was no backward since the last step.
        """
        self.forward.weights_change()
        optimizer = self.gradients.finish()
        self._norm = self.clipping.apply(self._states)
        self._lr = float(optimizer.param_groups[0]["lr"])
        refused = self.guard.refuses(
            self._norm,
            step=self.steps + self.skipped_steps + 1,
            scaled=self.scaler.moves,
            replay=self.replay,
            forget=self.forget,
        )
        self._skipped = (self.scaler.moves and self.scaler.update(float(self._norm))) or refused
        if self._skipped:
            self.skipped_steps += 1
        else:
            with self._step_guard.opened():
                self._states.step()
            self.steps += 1
            if self.lr_scheduler is not None and self.steps_scheduler:
                self.lr_scheduler.step()
        self.forget()
        self._values = self._values_now(None, None, stepped=True)
        self._saver.look()
        return not self._skipped

    def forget(self) -> None:
        """Release the gradients since the last step."""
        self.gradients.forget()
        self.guard.forget()

    def replay(self, micro_steps: Sequence[MicroStep], *, keep: bool) -> Finding | None:
        """Repeat the micro-steps of this step, and return the first value that was not finite; all ranks must call.

        Args:
            micro_steps: their numbers, batches and losses; weights and random numbers are the same as in the first run.
            keep: reduce and clip the gradients, as in the first run.
        """
        before = self.micro_step, self.gradients.micro_steps
        self.gradients.forget()
        search = NonFiniteSearch(self._model, self._world)
        try:
            for each in micro_steps:
                self.micro_step = each.number
                shares = self.forward.shares(each.work)
                with search.looking(each.work, each.number):
                    last = each is micro_steps[-1]
                    loss = self._forward_backward(each.work, shares, last=last, shown=False, replays=False)
                search.saw_loss(loss, each.number)
        finally:
            self.micro_step, self.gradients.micro_steps = before
        if keep:
            self._states.finish(1.0 / self.scaler.scale)
            self._norm = self.clipping.apply(self._states)
        return search.first_of_all()

    # -- results -----------------------------------------------------------------------------------------------------

    @property
    def last(self) -> StepMetrics | None:
        """Metrics of the last micro-step or step; None before the first. Reading them waits for the device."""
        return None if self._values is None else self._values.metrics

    @property
    def loss(self) -> Tensor:
        """The last micro-step's mean loss over all tokens of the global batch, on the device; nan if no token counts."""
        if self._values is None:
            raise TrainingError("there is no loss before the first train_step")
        return self._values.mean_loss

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of the whole model's gradient in the last step before clipping, on the device; None before the first."""
        return self._norm

    def _values_now(self, loss: Tensor | None, tokens: Tensor | None, *, stepped: bool) -> StepValues:
        return StepValues(
            loss,
            tokens,
            self._norm,
            dict(
                step=self.steps,
                micro_step=self.micro_step,
                stepped=stepped,
                lr=self._lr,
                loss_scale=self.scaler.scale,
                skipped=self._skipped,
                skipped_steps=self.skipped_steps,
            ),
        )
