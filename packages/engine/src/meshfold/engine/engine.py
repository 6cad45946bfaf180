"""The engine: a model, one line of spec, and a train step that can be read from top to bottom."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from meshfold.engine.accumulation import Accumulation
from meshfold.engine.arguments import Arguments
from meshfold.engine.batches.cut import cut
from meshfold.engine.batches.loader import ShardedLoader
from meshfold.engine.batches.positions import DataPositions
from meshfold.engine.build import build
from meshfold.engine.checkpoints import persistence
from meshfold.engine.checkpoints.background_save import BackgroundSave
from meshfold.engine.checkpoints.saving import Saver
from meshfold.engine.forward import check_loss
from meshfold.engine.integrations import integration
from meshfold.engine.long_runs.nonfinite import NonFiniteGuard
from meshfold.engine.metrics import StepMetrics, metrics_of
from meshfold.engine.pipelining import PipelinedModel, check_own_loop
from meshfold.engine.precision import LossScaler
from meshfold.engine.randomness import randomness
from meshfold.mesh import ParallelSpec, all_reduce
from meshfold.mesh.recording import at_step
from meshfold.mesh.spec import reject_unknown_arguments
from meshfold.mesh.watchdog import report_errors

if TYPE_CHECKING:
    from meshfold.engine.batches.batch import Batch
    from meshfold.engine.batches.shares import Shares
    from meshfold.engine.zero.residency import Residency
    from meshfold.zero_gemini.optimizer.backward_role import Backward

_DATA_PARALLEL: Mapping[str, object] = {}


class Engine:
    """Trains a model under a parallel spec.

    >>> engine = Engine(model, parallel=dict(data=2, tensor=4), optimizer=dict(name="adamw", lr=3e-4))  # doctest: +SKIP
    >>> loss = engine.train_step(batch)                                                                 # doctest: +SKIP

    Attributes:
        model: this rank's part of the model.
        mesh: the ranks, by named axes.
        spec: the checked spec.
        report: what tensor parallelism did to each submodule; None if the model was left whole.
        loaded: what the weights of a Hugging Face folder were to the model; None if it is of no folder.
        optimizer: over the true weights of this rank's blocks; :meth:`step` steps it, and its own ``step()`` raises a
            TrainingError. None for evaluation only.
        lr_scheduler: stepped after each optimizer step; None if none was given.
        pipeline: runs the model where the spec has ``pipeline``, without gradients if it is called; else None.
        steps: of the optimizer so far; ``skipped_steps`` were left out for an overflow.
        micro_step: forwards that were trained so far: calls of ``train_step``, or of the engine itself.
        last: what the last ``train_step`` or ``step`` did; None before the first.
    """

    @report_errors
    @reject_unknown_arguments
    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        parallel: Mapping[str, object] | ParallelSpec = _DATA_PARALLEL,
        *,
        optimizer: object = None,
        precision: object = "fp32",
        clip_grad_norm: float | None = None,
        clip_norm_type: float = 2.0,
        clip_grad_value: float | None = None,
        gradient_accumulation: int = 1,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        seed: int = 0,
        device: torch.device | str | None = None,
        rules: Mapping[str, str] | None = None,
        recompute: str | None = None,
        example: Any = None,
        nonfinite: str | None = None,
        watchdog: float | None = None,
        check_collectives: bool | None = None,
    ) -> None:
        """Args:
            model: a module (rank 0's weights are used), or a function that builds one, which is then never
                materialised whole and starts from the same weights under every spec; or
                :func:`meshfold.engine.pretrained` of a Hugging Face folder, read straight into place.
            parallel: the spec, as in ``dict(data=2, tensor=dict(mode="2d", size=4))``.
            optimizer: ``dict(name="adamw", lr=...)``, or a class or function of the parameters. None: evaluation only.
            precision: ``"fp32"``, ``"fp64"``, ``"bf16"``, ``"fp16"``, or ``dict(name="fp16", initial_scale=...)``.
            clip_grad_norm: largest norm of the whole model's gradient.
            clip_norm_type: which norm: 2.0, 1.0 or math.inf.
            clip_grad_value: largest absolute value of a gradient's element; not with ``clip_grad_norm``.
            gradient_accumulation: calls of ``train_step`` to one optimizer step.
            loss_fn: ``loss_fn(output, batch)``: a mean over the batch's targets; a model that can do without ``labels`` is then
                not given them. None: ``output.loss``, the model's own.
            lr_scheduler: makes a torch scheduler of the optimizer.
            seed: of initial weights, dropout and the order of data.
            device: by default this rank's GPU, or the CPU.
            rules: roles of submodules that tensor parallelism cannot tell by name and shape.
            recompute: which activations backward recomputes: None: the model's own business. ``"blocks"``: those of every
                repeated block. ``"auto"``: under ``zero=dict(placement="auto")``, of the blocks that the plan says.
            example: a small batch, for ``pipeline`` with a model that is not called with token ids: to see what comes before
                its blocks. Values do not matter. Under other specs the model's signature is all that it is held against.
            nonfinite: what to do before a step whose loss or gradient is nan or infinite: ``"error"``, ``"skip"`` (leave it
                out) or ``"report"`` (and step); each says where it arose. None: do not look.
            watchdog: seconds after which a collective that does not finish ends the job, naming the ranks that did not
                come (default: ``MESHFOLD_WATCHDOG``, else 600); 0 for none.
            check_collectives: compare every collective's shapes, dtypes and kinds between its ranks before it runs; slow
                (default: whether ``MESHFOLD_DEBUG=collectives``).

        Raises:
            SpecError: for every setting that is wrong, and for a name that is none of these, before anything starts.
        """
        asked = Arguments.check(
            parallel=parallel, optimizer=optimizer, precision=precision, gradient_accumulation=gradient_accumulation,
            clip_grad_norm=clip_grad_norm, clip_norm_type=clip_norm_type, clip_grad_value=clip_grad_value, seed=seed,
            loss_fn=loss_fn, lr_scheduler=lr_scheduler, nonfinite=nonfinite, watchdog=watchdog,
            check_collectives=check_collectives,
        )  # fmt: skip
        with ExitStack() as self._open:  # what is to be closed, the last first
            built = build(
                self, model, parallel, asked, self._open, device=device, rules=rules, recompute=recompute, example=example
            )  # fmt: skip
            self._precision, self._clip, self._looks_at_all = asked.precision, asked.clip, asked.looks_at_all
            self._accumulation, self._seed = asked.accumulation, asked.seed
            self._weight: float | None = None  # of a micro-step in its step; None: they are averaged
            self._world, part = built.world, built.part
            self.spec, self.mesh, self.device = built.world.spec, built.world.mesh, built.world.device
            self.model, self.report, self.loaded = part.model, part.report, part.loaded
            self._torch_dropout, self._pipelined, self._blocks = (
                part.torch_dropout,
                part.pipelined,
                built.blocks,
            )
            self.pipeline = None if part.pipelined is None else part.pipelined.pipeline
            self._states, self._model_state, self._forward = built.states, built.model_state, built.forward
            self.optimizer, self.lr_scheduler = built.states.optimizer, built.lr_scheduler
            self._own_step = built.step_guard
            self._scaler = LossScaler(asked.precision.scale, says=self.mesh.rank == 0)
            self._guard = NonFiniteGuard(asked.nonfinite)
            self._saver = Saver(built.world)
            self._gradients = Accumulation(
                built.states, self._scaler, self._saver, stages=built.world.pipelined
            )
            self._data = DataPositions()

            self.steps = self.micro_step = self.skipped_steps = 0
            self.last: StepMetrics | None = None
            # Of the last step.
            self._norm: Tensor | None = None
            self._lr = 0.0 if self.optimizer is None else float(self.optimizer.param_groups[0]["lr"])
            self._skipped = False
            self._open = self._open.pop_all()  # it stands: not before close()

    # -- training -----------------------------------------------------------------------------------------------

    @property
    def _steps_at_once(self) -> bool:
        """Tell whether the optimizer steps right after the last backward, before anyone can look at gradients."""
        return True

    @report_errors
    def train_step(self, batch: Any) -> float:
        """One micro-step on this data coordinate's batch; every ``gradient_accumulation``-th call steps the optimizer.

        Each micro-step's gradient is that of the mean over all tokens of the global batch, however many each rank
        has; micro-steps are averaged.

        Returns:
            The mean loss over all tokens of the global batch, the same on every rank; nan if none counts.

        Raises:
            SpecError: for a batch the model cannot be called with.
            TrainingError: without an optimizer.
        """
        self._gradients.check_open()
        at_step(self.steps + self.skipped_steps + 1)
        work = self._forward.prepare(batch)
        last = self._gradients.place == self._accumulation - 1
        self.model.train()
        shares = self._forward.shares(work)
        loss = all_reduce(self._forward_backward(work, shares, last=last), self._world.data_group)
        self._guard.saw(self.micro_step, work, loss)
        self.micro_step += 1
        self._gradients.place += 1
        if last:
            self.step()
        count = int(shares.total())
        self.last = metrics_of(self, float(loss) if count else math.nan, count, stepped=last)
        return self.last.loss

    def _forward_backward(self, work: Batch, shares: Shares, *, last: bool) -> Tensor:
        """A micro-step: this rank's share of the global loss; its gradient is added to those since the last step."""
        if self._pipelined is not None:
            return self._through_stages(self._pipelined, work, shares, last=last)
        while True:
            try:
                return self._in_one_piece(work, shares, last=last)
            except RuntimeError as error:
                self._gradients.break_off()
                if self._gradients.backwards or not self._states.can_relieve(error):
                    raise
            # Memory ran out, and more can be made: here, where the error no longer holds on to the graph.
            self._saver.before_change()  # chunks move
            self._states.relieve()

    def _in_one_piece(self, work: Batch, shares: Shares, *, last: bool) -> Tensor:
        """Forward, then backward, of the whole batch."""
        self._gradients.begin()
        with self._randomness(shares):
            mine = self._forward.loss(work, shares)
            share = shares.weight()
            # The final one, where nobody looks at the gradients before the optimizer does: it may step as they come.
            kind: Backward = "more" if not last else "last" if self._looks_at_all else "final"
            self._gradients.backward(
                mine * self._of_step(share), kind, shown=not (last and self._steps_at_once)
            )
        return mine.detach() * share

    def _through_stages(self, stages: PipelinedModel, work: Batch, shares: Shares, *, last: bool) -> Tensor:
        """Forwards and backwards of micro-batches take turns."""
        self._gradients.begin(anew=True)
        with self._randomness(shares):
            works = stages.look_ahead(work)
        share = shares.weight()
        with (
            self._randomness(shares),
            self._gradients.taking("last" if last else "more", shown=not (last and self._steps_at_once)),
        ):
            mine = stages.step(works, self._of_step(share * self._scaler.scale))
        return mine * share

    def _of_step(self, share: Any) -> Any:
        """What of a micro-step's share goes into its step."""
        return share / self._accumulation if self._weight is None else share * self._weight

    @contextmanager
    def _accumulating(self, steps: int, weight: float | None) -> Iterator[None]:
        """Micro-steps inside are of a step that has so many of them; ``weight``: what counts of one's mean, None: 1 / steps."""
        before = self._accumulation, self._weight
        self._accumulation, self._weight = steps, weight
        try:
            yield
        finally:
            self._accumulation, self._weight = before

    # The halves of a train step, for a loop of one's own.

    @report_errors
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, to be trained on: on this rank's inputs, in training mode, with dropout.

        Tensors are brought to the device and floating ones to the model's precision. Of several calls before a
        backward each drops other elements. Rows of the first tensor are taken for this data coordinate's part of
        the global batch. For evaluation call ``engine.model`` under ``torch.no_grad()`` in evaluation mode.
        """
        check_own_loop(self._pipelined, "engine(...)")
        work = self._forward.inputs(args, kwargs)
        self.model.train()
        if torch.is_grad_enabled():
            self._gradients.begin()
        with self._randomness(self._forward.shares(work)):
            output = self._forward.output(work)
        self.micro_step += 1
        return output

    @report_errors
    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Add a loss's gradient to what the next :meth:`step` steps with; call it as often as there are losses.

        ``loss`` is a mean over this rank's own batch, and what counts is the mean over the data ranks: the serial
        gradient if they all have equally many rows. Gradients of several backwards are summed, as in torch. Those
        that come into this model in any other way (another engine's backward goes through it, say) do not count.

        Gradients are summed over the data axes while backward runs, unless :meth:`no_sync` says that more will come.
        All ranks must call; parameters that a rank's loss does not depend on count as zero there.

        Args:
            loss: a scalar; multiplied with the loss scale here.
            retain_graph: whether another backward will go through the same forward.

        Raises:
            SpecError: for a loss that is no scalar that depends on parameters.
            TrainingError: without an optimizer.
        """
        check_own_loop(self._pipelined, "engine.backward(loss)")
        check_loss(loss)
        kind: Backward = "last" if self._gradients.summed else "apart"
        self._gradients.backward(loss.double() / self._world.data_size, kind, retain_graph=retain_graph)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside are not the last of an accumulation: their gradients are not summed over the data axes yet.

        The sum is made in the first :meth:`backward` outside, or in :meth:`step`. Until then every rank holds whole
        gradients: under ``zero`` from stage 2 on as many times its share of them as there are data ranks, and those where
        the optimizer's state lives. ``gradient_accumulation`` holds no more than the share, and sums every time.
        """
        check_own_loop(self._pipelined, "engine.no_sync()")
        return self._gradients.no_sync()

    @report_errors
    def step(self) -> bool:
        """End an accumulation: unscale, clip, and let optimizer and scheduler step; gradients are gone then.

        Returns:
            Whether the optimizer stepped: under fp16 a step whose gradients overflowed is left out.

        Raises:
            TrainingError: if there was no backward since the last step.
        """
        optimizer = self._gradients.finish()
        self._norm = self._clip.apply(self._states)
        self._lr = float(optimizer.param_groups[0]["lr"])
        refused = self._guard.refuses(self, self._norm)
        self._skipped = (self._scaler.moves and self._scaler.update(float(self._norm))) or refused
        if self._skipped:
            self.skipped_steps += 1
        else:
            with self._own_step.opened():
                self._states.step()
            self.steps += 1
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        self.zero_grad()
        self.last = metrics_of(self, math.nan, 0, stepped=True)
        self._saver.look()
        return not self._skipped

    def zero_grad(self) -> None:
        """Let go of the gradients since the last step; :meth:`step` does so by itself."""
        self._gradients.forget()
        self._guard.forget()

    def _randomness(self, shares: Shares) -> AbstractContextManager[object]:
        """Dropout of this micro-step: every element of the global batch has one fate, under every spec."""
        return randomness(self._seed, self.micro_step, shares, self.device, torch_too=self._torch_dropout)

    # -- evaluation ---------------------------------------------------------------------------------------------

    def eval_step(self, batch: Any) -> float:
        """The mean loss over all tokens of the global batch, without dropout and without training."""
        return self._assessed(batch)[0]

    @report_errors
    @torch.no_grad()
    def _assessed(self, batch: Any) -> tuple[float, int]:
        """The mean loss over all tokens of the global batch, and how many they are; nan if none counts."""
        work = self._forward.prepare(batch)
        shares = self._forward.shares(work, places=False)
        loss = all_reduce(self._forward.assess(work, shares) * shares.weight(), self._world.data_group)
        count = int(shares.total())
        return (float(loss) if count else math.nan), count

    @report_errors
    def _targets(self, batch: Any) -> int:
        """How many tokens of the global batch count."""
        return int(self._forward.shares(self._forward.prepare(batch), places=False).total())

    @property
    def generator(self) -> Any:
        """What :func:`meshfold.models.generate` can be given on all ranks: the model, or the pipeline of its stages."""
        return self.model if self.pipeline is None else self.pipeline

    @property
    def residency(self) -> Residency | None:
        """Under ``zero``: what was planned of where the model's state lives, and what came of it; else None."""
        return self._states.residency

    def print(self, *values: object, **options: Any) -> None:
        """Print on rank 0 alone, at once; arguments as of Python's ``print``. Any ranks may call."""
        if self.mesh.rank == 0:
            print(*values, **{"flush": True, **options})

    # -- data ---------------------------------------------------------------------------------------------------

    def shard_batch(self, global_batch: Any) -> Any:
        """This data coordinate's rows of a global batch, in the same form.

        Rows are dealt in order and as evenly as possible; a coordinate that gets none has a row that does not count.
        """
        return cut(global_batch, self._world.row_index, self._world.row_size)

    def dataloader(
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool = True,
        seed: int | None = None,
        *,
        name: str = "train",
        **options: Any,
    ) -> ShardedLoader:
        """Serve a dataset: each rank its rows of global batches of ``batch_size``, the same ones under every spec.

        Args:
            dataset: has a length and gives an example for a number.
            batch_size: rows of the *global* batch of one micro-step.
            shuffle: a new order each epoch.
            seed: of the orders; by default the engine's.
            name: under which checkpoints keep the position.
            options: ``drop_last`` and what torch.utils.data.DataLoader takes.
        """
        loader = ShardedLoader(
            dataset,
            batch_size=batch_size,
            index=self._world.row_index,
            blocks=self._world.row_size,
            shuffle=shuffle,
            seed=self._seed if seed is None else seed,
            **options,
        )
        self._data.follow(name, loader)
        return loader

    # -- state --------------------------------------------------------------------------------------------------

    def full_state_dict(self) -> dict[str, Tensor]:
        """What a single process's ``state_dict()`` would hold, on every rank and in CPU memory; all ranks must call.

        Under bf16 and fp16 trained parameters come as their float32 masters.
        """
        return self._model_state.full()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the whole model's state dict, the same on every rank.

        Raises:
            CheckpointError: if names or shapes are not the model's.
        """
        self._saver.before_change()
        self._model_state.load(state)

    def save(self, path: str | os.PathLike[str], *, asynchronous: bool = False) -> BackgroundSave | None:
        """Write a checkpoint folder that can be loaded under any other spec; all ranks must call.

        Args:
            path: the folder.
            asynchronous: copy what this rank keeps to host memory, and write it while training goes on. What comes back has
                ``wait()``, ``done`` and ``error``; nobody has to ask: what fails is raised on all ranks by the next step, save,
                load or close, and a later save waits for this one. Until it is complete the checkpoint before stays.

        Raises:
            CheckpointError: in the middle of an accumulation, or if a rank cannot write.
        """
        return persistence.save(self, path, asynchronous=asynchronous)

    def load(self, path: str | os.PathLike[str], *, weights_only: bool = False, verify: bool = True) -> None:
        """Go on from a checkpoint, saved under whatever spec; all ranks must call. Gradients since the last step are let go.

        Args:
            path: the folder.
            weights_only: take the model and leave optimizer, counters and data positions as they are.
            verify: compare every tensor with its checksum first; the ranks share this out.

        Raises:
            CheckpointError: if there is none, it is damaged, it is of another model or optimizer, or it has the model alone;
                then nothing has changed.
        """
        persistence.load(self, path, weights_only=weights_only, verify=verify)

    def save_hugging_face(
        self,
        folder: str | os.PathLike[str],
        *,
        like: str | os.PathLike[str] | None = None,
        dtype: str | None = None,
        shard_bytes: int = 5 * 10**9,
    ) -> None:
        """Write the model as a folder that transformers loads; all ranks must call. Tensor by tensor: none holds the whole.

        Our own GPT and Llama are written as GPT-2 and Llama, or Mistral if it has a window.

        Args:
            folder: not there yet, or empty.
            like: a Hugging Face folder, such as the model came from: tokenizer files are taken from it, and the dtype that
                each tensor has there.
            dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"`` for all floating tensors; None: as in ``like``, else as they
                are here, trained ones in float32 under bf16 and fp16.
            shard_bytes: of a file of weights, at most, unless one tensor is larger.

        Raises:
            CheckpointError: if it cannot be written, or there is no such model in transformers.
        """
        integration("meshfold.huggingface").save_hugging_face(
            self, folder, like=like, dtype=dtype, shard_bytes=shard_bytes
        )

    # -- the end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give back the mesh's process groups and take the hooks off the model. The processes stay connected.

        The model keeps what this rank has of it: all, or with ``tensor`` and ``pipeline`` its part; under ``zero`` stage 3 its
        share of the chunks goes too. Ask for :meth:`full_state_dict` before.

        Waits for a save that is under way; if it failed, that is raised on all ranks.
        """
        try:
            if sys.exc_info()[0] is None:
                self._saver.finish()
            else:  # the other ranks may not come
                self._saver.abandon()
        finally:
            self._gradients.close()
            self._open.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
