"""The engine: a model, one line of spec, and a train step that can be read from top to bottom."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from meshfold.engine import recompute as recomputation
from meshfold.engine import settings
from meshfold.engine.assemble import assemble, make_states
from meshfold.engine.batches import batch as batches
from meshfold.engine.batches.cut import cut
from meshfold.engine.batches.loader import ShardedLoader
from meshfold.engine.batches.shares import Shares
from meshfold.engine.checkpoints import persistence
from meshfold.engine.checkpoints.background_save import BackgroundSave
from meshfold.engine.checkpoints.model_state import ModelState
from meshfold.engine.checkpoints.pipelined_state import PipelinedState
from meshfold.engine.checkpoints.saving import Saver
from meshfold.engine.clipping import Clipping
from meshfold.engine.errors import TrainingError
from meshfold.engine.hugging_face import exporting
from meshfold.engine.hugging_face.writing import SHARD_BYTES
from meshfold.engine.long_runs import supervision
from meshfold.engine.long_runs.nonfinite import NonFiniteGuard, check_mode
from meshfold.engine.metrics import StepMetrics
from meshfold.engine.optimizers import optimizer_factory, scheduler_of
from meshfold.engine.pipelining import PipelinedModel, PipelineSettings
from meshfold.engine.precision import LossScaler, Precision
from meshfold.engine.randomness import randomness
from meshfold.engine.sequence import split_sequence
from meshfold.engine.world import has_zero, join
from meshfold.mesh import ParallelSpec, SpecError, all_reduce, flight

if TYPE_CHECKING:
    from meshfold.engine.zero.residency import Residency
    from meshfold.zero_gemini.backward import Backward

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
        optimizer: over the true weights of this rank's blocks; None for evaluation only.
        lr_scheduler: stepped after each optimizer step; None if none was given.
        pipeline: runs the model where the spec has ``pipeline``, without gradients if it is called; else None.
        steps: of the optimizer so far; ``skipped_steps`` were left out for an overflow.
        micro_step: forwards that were trained so far: calls of ``train_step``, or of the engine itself.
        last: what the last ``train_step`` or ``step`` did; None before the first.
    """

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
            loss_fn: ``loss_fn(output, batch)``, for models whose output has no loss: a mean over the batch's targets.
            lr_scheduler: makes a torch scheduler of the optimizer.
            seed: of initial weights, dropout and the order of data.
            device: by default this rank's GPU, or the CPU.
            rules: roles of submodules that tensor parallelism cannot tell by name and shape.
            recompute: which activations backward recomputes: None: the model's own business. ``"blocks"``: those of every
                repeated block. ``"auto"``: under ``zero=dict(placement="auto")``, of the blocks that the plan says.
            example: a small batch, for ``pipeline`` with a model that is not called with token ids: to see what comes before
                its blocks. Values do not matter.
            nonfinite: what to do before a step whose loss or gradient is nan or infinite: ``"error"``, ``"skip"`` (leave it
                out) or ``"report"`` (and step); each says where it arose. None: do not look.
            watchdog: seconds after which a collective that does not finish ends the job, naming the ranks that did not
                come (default: ``MESHFOLD_WATCHDOG``, else 600); 0 for none.
            check_collectives: compare every collective's shapes, dtypes and kinds between its ranks before it runs; slow
                (default: whether ``MESHFOLD_DEBUG=collectives``).

        Raises:
            SpecError: for every setting that is wrong, before anything starts.
        """
        self._precision = Precision.parse(precision)
        make_optimizer = optimizer_factory(optimizer, whole=has_zero(parallel))
        self._clip = Clipping.parse(clip_grad_norm, clip_norm_type, clip_grad_value)
        # Whether something is asked of all gradients together before the first of them may be stepped with.
        guarded = check_mode(nonfinite)
        self._looks_at_all = self._clip.needs_all or self._precision.scale is not None or guarded is not None
        self._accumulation = settings.count("gradient_accumulation", gradient_accumulation)
        self._seed = settings.count("seed", seed, least=0)
        if loss_fn is not None and not callable(loss_fn):
            raise SpecError(f"loss_fn={loss_fn!r}: a function of the model's output and the batch")
        if lr_scheduler is not None and make_optimizer is None:
            raise SpecError(
                "lr_scheduler without an optimizer: give Engine(..., optimizer=dict(name='adamw', lr=...))"
            )
        self._loss_fn = loss_fn
        limit_s, compare = supervision.check(watchdog, check_collectives)

        self._world = join(parallel, device)
        self._watch = supervision.watch_over(self._world, limit_s, compare)
        self.spec, self.mesh, self.device = self._world.spec, self._world.mesh, self._world.device
        recompute = recomputation.check(recompute, self.spec)
        stages = PipelineSettings(loss_fn=loss_fn, example=example)
        built = assemble(model, self._world, self._precision, self._seed, rules, stages)
        self._pipelined = built.pipelined
        self.pipeline = None if built.pipelined is None else built.pipelined.pipeline
        self.model, self.report, self.loaded = built.model, built.report, built.loaded
        self._torch_dropout = built.torch_dropout
        self._sequence = split_sequence(self.model, self._world, own_loss=loss_fn is not None)
        around = None if self._sequence is None else self._sequence.repeated
        own_blocks = None if self._pipelined is None else self._pipelined.blocks()
        self._blocks = recomputation.RecomputedBlocks(self.model, around, own_blocks) if recompute else None
        self._shifted = loss_fn is None and batches.loss_is_shifted(self.model)
        self._takes_cache = batches.takes_cache(self.model)
        self._states = make_states(
            built,
            self._world,
            self._precision,
            make_optimizer,
            accumulation=self._accumulation,
            seed=self._seed,
            blocks=self._blocks if recompute == "auto" else None,
            looks_at_all=self._looks_at_all,
        )
        self._scaler = LossScaler(self._precision.scale, says=self.mesh.rank == 0)
        if self._pipelined is None:
            self._model_state = ModelState(self.model, self._states, self._world)
        else:
            self._pipelined.attach(self._states)
            inventory = self._pipelined.inventory
            self._model_state = PipelinedState(self.model, self._states, self._world, inventory)
        self.optimizer = self._states.optimizer
        self.lr_scheduler = scheduler_of(lr_scheduler, self.optimizer)

        self.steps = self.micro_step = self.skipped_steps = 0
        self.last: StepMetrics | None = None
        self._norm: Tensor | None = None
        self._lr = 0.0 if self.optimizer is None else float(self.optimizer.param_groups[0]["lr"])
        self._skipped = self._begun = False
        self._backwards = self._place = 0  # since the last step: backwards, micro-steps of ``train_step``
        self._sync = True
        self._saver = Saver(self._world)
        self._loaders: dict[str, ShardedLoader] = {}
        self._positions: dict[str, dict[str, int]] = {}
        self._guard = None if guarded is None else NonFiniteGuard(self, guarded)

    # -- training -----------------------------------------------------------------------------------------------

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
        flight.at_step(self.steps + self.skipped_steps + 1)
        work = self._prepare(batch)
        last = self._place == self._accumulation - 1
        self.model.train()
        shares = Shares(work, self._world, shifted=self._shifted, places=True)
        loss = self._forward_backward(work, shares, last=last)
        while loss is None:  # memory ran out, and there is more now
            loss = self._forward_backward(work, shares, last=last)
        loss = all_reduce(loss, self._world.data_group)
        if self._guard is not None:
            self._guard.saw(work, loss)
        self.micro_step += 1
        self._place += 1
        if last:
            self.step()
        count = int(shares.total())
        self.last = self._metrics(float(loss) if count else math.nan, count, stepped=last)
        return self.last.loss

    def _forward_backward(self, work: batches.Batch, shares: Shares, *, last: bool) -> Tensor | None:
        """A micro-step's share of the loss; None if memory ran out, nothing was done, and more was made."""
        if self._pipelined is not None:
            return self._through_stages(self._pipelined, work, shares, last=last)
        try:
            self._begin()
            with self._randomness(shares):
                mine = self._loss(work, shares)
                share = shares.weight()
                kind: Backward = "more" if not last else "last" if self._looks_at_all else "final"
                self._backward(mine * (share / self._accumulation), kind)
            return mine.detach() * share
        except RuntimeError as error:
            self._begun = False
            if self._backwards or not self._states.can_relieve(error):
                raise
        self._states.relieve()  # here, where the error no longer holds on to the graph
        return None

    def _through_stages(
        self, stages: PipelinedModel, work: batches.Batch, shares: Shares, *, last: bool
    ) -> Tensor:
        """A micro-step's share of the loss, of a model in stages: as many backwards as there are micro-batches."""
        self._begun = False  # also if the one before was broken off
        self._begin()
        with self._randomness(shares):
            works = stages.look_ahead(work)
        share = shares.weight()
        with self._randomness(shares), self._states.backward("last" if last else "more"):
            mine = stages.step(works, share * (self._scaler.scale / self._accumulation))
        self._begun = False
        self._backwards += 1
        return mine * share

    def _no_loop(self, what: str) -> None:
        if self._pipelined is not None:
            raise SpecError(
                f"{what} under pipeline: forward and backward of micro-batches take turns there, so a loop of one's own "
                "cannot call them apart. Call engine.train_step(batch), and engine.eval_step(batch) to evaluate"
            )

    # The halves of a train step, for a loop of one's own.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, to be trained on: on this rank's inputs, in training mode, with dropout.

        Tensors are brought to the device and floating ones to the model's precision. Of several calls before a
        backward each drops other elements. Rows of the first tensor are taken for this data coordinate's part of
        the global batch. For evaluation call ``engine.model`` under ``torch.no_grad()`` in evaluation mode.
        """
        self._no_loop("engine(...)")
        work = batches.inputs(args, kwargs, self.device, self._precision.dtype)
        self.model.train()
        if torch.is_grad_enabled():
            self._begin()
        shares = Shares(work, self._world, shifted=False, places=True)
        with self._randomness(shares):
            output = self._forward(work)
        self.micro_step += 1
        return output

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
        self._no_loop("engine.backward(loss)")
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise SpecError(
                f"backward({what}): a loss is a tensor of one element that was computed from the model's parameters"
            )
        kind: Backward = "last" if self._sync else "apart"
        self._backward(loss.double() / self._world.data_size, kind, retain_graph=retain_graph)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside are not the last of an accumulation: their gradients are not summed over the data axes yet.

        The sum is made in the first :meth:`backward` outside, or in :meth:`step`. Until then every rank holds whole
        gradients: under ``zero`` from stage 2 on as many times its share of them as there are data ranks, and those where
        the optimizer's state lives. ``gradient_accumulation`` holds no more than the share, and sums every time.
        """
        self._no_loop("engine.no_sync()")
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def step(self) -> bool:
        """End an accumulation: unscale, clip, and let optimizer and scheduler step; gradients are gone then.

        Returns:
            Whether the optimizer stepped: under fp16 a step whose gradients overflowed is left out.

        Raises:
            TrainingError: if there was no backward since the last step.
        """
        optimizer = self._trains()
        if not self._backwards:
            raise TrainingError("step() without a backward() since the last one: there are no gradients")
        states = self._states
        self._saver.before_change()
        states.finish(1.0 / self._scaler.scale)
        self._norm = self._clip.apply(states)
        self._lr = float(optimizer.param_groups[0]["lr"])
        refused = self._guard is not None and self._guard.refuses(self._norm)
        self._skipped = (self._scaler.moves and self._scaler.update(float(self._norm))) or refused
        if self._skipped:
            self.skipped_steps += 1
        else:
            states.step()
            self.steps += 1
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        self.zero_grad()
        self.last = self._metrics(math.nan, 0, stepped=True)
        self._saver.look()
        return not self._skipped

    def zero_grad(self) -> None:
        """Let go of the gradients since the last step; :meth:`step` does so by itself."""
        self._states.forget()
        self._backwards = self._place = 0
        if self._guard is not None:
            self._guard.forget()

    def _trains(self) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise TrainingError(
                "this engine has no optimizer: give Engine(..., optimizer=dict(name='adamw', lr=...))"
            )
        return self.optimizer

    def _begin(self) -> None:
        """Before a forward whose backward will follow."""
        self._trains()
        if not self._begun:
            self._begun = True
            if self._states.all_read:  # chunks move, and may be stepped with, before step() is called
                self._saver.before_change()
            self._states.begin(first=not self._backwards)

    def _backward(self, share: Tensor, kind: Backward, *, retain_graph: bool = False) -> None:
        """Backward of this rank's share of a loss: gradients are summed over the data ranks."""
        self._begin()
        with self._states.backward(kind):
            (share * self._scaler.scale).backward(retain_graph=retain_graph)
        self._begun = False
        self._backwards += 1

    def _metrics(self, loss: float, tokens: int, *, stepped: bool) -> StepMetrics:
        return StepMetrics(
            step=self.steps,
            micro_step=self.micro_step,
            loss=loss,
            tokens=tokens,
            stepped=stepped,
            grad_norm=None if self._norm is None else float(self._norm),
            lr=self._lr,
            loss_scale=self._scaler.scale,
            skipped=self._skipped,
            skipped_steps=self.skipped_steps,
        )

    # -- evaluation ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def eval_step(self, batch: Any) -> float:
        """The mean loss over all tokens of the global batch, without dropout and without training."""
        work = self._prepare(batch)
        shares = Shares(work, self._world, shifted=self._shifted, places=False)
        training = self.model.training
        self.model.eval()
        try:
            mine = self._loss(work, shares) if self._pipelined is None else self._pipelined.assess(work)
        finally:
            self.model.train(training)
        loss = all_reduce(mine * shares.weight(), self._world.data_group)
        return float(loss) if int(shares.total()) else float("nan")

    def _prepare(self, batch: Any) -> batches.Batch:
        work = batches.prepare(batch, self.device, self._precision.dtype, own_loss=self._loss_fn is not None)
        if self._takes_cache:
            work.kwargs.setdefault("use_cache", False)
        return work

    def _randomness(self, shares: Shares) -> AbstractContextManager[object]:
        """Dropout of this micro-step: every element of the global batch has one fate, under every spec."""
        return randomness(self._seed, self.micro_step, shares, self.device, torch_too=self._torch_dropout)

    def _loss(self, work: batches.Batch, shares: Shares) -> Tensor:
        """This data coordinate's mean loss in float64; 0 if nothing counts here."""
        output = self._forward(work)
        loss = batches.loss_of(output, work, self._loss_fn).double()
        # Where nothing counts the loss is 0/0, and so may be its gradient: neither must get through.
        return torch.where(shares.count > 0, loss, 0.0)

    def _forward(self, work: batches.Batch) -> Any:
        try:
            return self.model(*work.args, **work.kwargs)
        except RuntimeError as error:
            self._states.explain(error)
            raise

    @property
    def generator(self) -> Any:
        """What :func:`meshfold.engine.models.generate` can be given on all ranks: the model, or the pipeline of its stages."""
        return self.model if self.pipeline is None else self.pipeline

    @property
    def residency(self) -> Residency | None:
        """Under ``zero``: what was planned of where the model's state lives, and what came of it; else None."""
        return self._states.residency

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
        if name in self._positions:
            loader.load_state_dict(self._positions.pop(name))
        self._loaders[name] = loader
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
        """Go on from a checkpoint, saved under whatever spec; all ranks must call.

        Args:
            path: the folder.
            weights_only: take the model and leave optimizer, counters and data positions as they are.
            verify: compare every tensor with its checksum first; the ranks share this out.

        Raises:
            CheckpointError: if there is none, it is damaged, or it is of another model or optimizer.
        """
        persistence.load(self, path, weights_only=weights_only, verify=verify)

    def save_hugging_face(
        self,
        folder: str | os.PathLike[str],
        *,
        like: str | os.PathLike[str] | None = None,
        dtype: str | None = None,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """Write the model as a folder that transformers loads; all ranks must call. Tensor by tensor: none holds the whole.

        Our own GPT and Llama are written as GPT-2 and Llama.

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
        exporting.save_hugging_face(self, folder, like=like, dtype=dtype, shard_bytes=shard_bytes)

    # -- the end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give back the mesh's process groups and take the hooks off the model. The processes stay connected.

        Waits for a save that is under way; if it failed, that is raised on all ranks.
        """
        try:
            if sys.exc_info()[0] is None:
                self._saver.finish()
            else:  # the other ranks may not come
                self._saver.abandon()
        finally:
            self._close()

    def _close(self) -> None:
        try:
            self._states.close()
        finally:  # also if a step that was promised failed
            if self._blocks is not None:
                self._blocks.close()
            if self._sequence is not None:
                self._sequence.close()
            self.mesh.close()
            self._watch.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
