"""The engine: a model, one line of spec, and a train step that can be read from top to bottom."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from meshfold.engine.assembly.arguments import Arguments
from meshfold.engine.assembly.build import build
from meshfold.engine.batches.loader import DataPositions, ShardedLoader
from meshfold.engine.batches.sharding import shard_batch
from meshfold.engine.checkpoints.saving import BackgroundSave, Saver
from meshfold.engine.model.pipelined_model import check_own_loop
from meshfold.engine.moved import integration
from meshfold.engine.persistence import load_checkpoint, save_checkpoint
from meshfold.engine.train_step import TrainStep
from meshfold.mesh import ParallelSpec, all_reduce
from meshfold.mesh.model_io import eval_mode
from meshfold.mesh.spec import reject_unknown_arguments
from meshfold.mesh.watchdog import report_errors

if TYPE_CHECKING:
    from meshfold.engine.train_step import StepMetrics
    from meshfold.engine.zero.residency import Residency

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
        compiled_blocks: what ``compile`` compiled; its ``str()`` is one line. None if nothing is.
        fp8_layers: the linear layers that multiply in fp8, and why others do not, to be printed; None if none was asked to.
        optimizer: over the master weights of this rank's blocks; :meth:`step` steps it, and its own ``step()`` raises a
            TrainingError. None for evaluation only.
        pipeline: runs the model where the spec has ``pipeline``, without gradients if it is called; else None.

    Attributes for packages that build on the engine:
        world: the ranks that hold each part of the model, and the groups that they communicate in.
        precision: the checked argument.
        states: weights, gradients and optimizer state.
        model_state: the whole model, as checkpoints have it.
        runner: forward, backward and the optimizer's step.
        recomputed_blocks: the blocks that backward recomputes; None if there are none.
        fused_kernels: the fused kernels in the model, to be printed; None with ``kernels="off"``.
        saver: saves that run beside the training.
        data_positions: of the loaders that checkpoints know.
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
        kernels: object = "auto",
        compile: object = False,
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
            precision: ``"fp32"``, ``"fp64"``, ``"bf16"``, ``"fp16"``, or ``dict(name="fp16", initial_scale=...)``, or
                ``dict(name="bf16", matmul="fp8", recipe=..., keep=("head", "router"))``: linear layers in fp8.
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
            kernels: fused kernels in the place of the model's own operations (:func:`meshfold.kernels.fuse.fuse`): ``"auto"``
                (where they pay), ``"off"``, or a dict of ``norm``, ``gated``, ``rotary``, ``loss``: True, False, None (auto).
            compile: True: every repeated block is compiled by torch.compile, one by one, or the model where it has none and the
                spec has neither ``zero`` nor ``pipeline``; or ``dict(backend=..., mode=..., dynamic=...)``.
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
            parallel=parallel,
            optimizer=optimizer,
            precision=precision,
            gradient_accumulation=gradient_accumulation,
            clip_grad_norm=clip_grad_norm,
            clip_norm_type=clip_norm_type,
            clip_grad_value=clip_grad_value,
            seed=seed,
            loss_fn=loss_fn,
            lr_scheduler=lr_scheduler,
            kernels=kernels,
            nonfinite=nonfinite,
            watchdog=watchdog,
            check_collectives=check_collectives,
            compile=compile,
        )
        with ExitStack() as self._open:  # what is to be closed, the last first
            built = build(
                self,
                model,
                parallel,
                asked,
                self._open,
                device=device,
                rules=rules,
                recompute=recompute,
                example=example,
            )
            self.world, part = built.world, built.part
            self.spec, self.mesh, self.device = built.world.spec, built.world.mesh, built.world.device
            self.model, self.report, self.loaded = part.model, part.report, part.loaded
            self.pipeline = None if part.pipelined is None else part.pipelined.pipeline
            self.precision, self.recomputed_blocks = asked.precision, built.blocks
            self.fused_kernels, self.compiled_blocks, self.fp8_layers = built.fused, built.compiled, built.fp8
            self.states, self.model_state = built.states, built.model_state
            self.optimizer = built.states.optimizer
            self.saver, self.data_positions = Saver(built.world), DataPositions()
            self.runner = TrainStep(built, asked, self.saver)
            self._open = self._open.pop_all()  # it stands: not before close()

    # -- training -----------------------------------------------------------------------------------------------

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
        self.run_step(batch)
        return self.runner.last.loss  # type: ignore[union-attr]  # there is a step

    @report_errors
    def run_step(self, batch: Any) -> None:
        """Run :meth:`train_step` without reading its loss, for which the host would wait for the device.

        :attr:`last` reads loss and norm when it is asked for.
        """
        self.runner.run(batch)

    @property
    def steps(self) -> int:
        """Optimizer steps so far."""
        return self.runner.steps

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps that were left out so far, for an overflow or by ``nonfinite="skip"``."""
        return self.runner.skipped_steps

    @property
    def micro_step(self) -> int:
        """Forwards that were trained so far: calls of :meth:`train_step`, or of the engine itself."""
        return self.runner.micro_step

    @property
    def lr_scheduler(self) -> Any:
        """Scheduler that is stepped after each optimizer step; None for none."""
        return self.runner.lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: Any) -> None:
        self.runner.lr_scheduler = scheduler

    @property
    def last(self) -> StepMetrics | None:
        """Metrics of the last :meth:`train_step` or :meth:`step`; None before the first."""
        return self.runner.last

    # The halves of a train step, for a loop of one's own.

    @report_errors
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, to be trained on: on this rank's inputs, in training mode, with dropout.

        Tensors are brought to the device and floating ones to the model's precision. Of several calls before a
        backward each drops other elements. Rows of the first tensor are taken for this data coordinate's part of
        the global batch. For evaluation call ``engine.model`` under ``torch.no_grad()`` in evaluation mode.
        """
        check_own_loop(self.runner.stages, "engine(...)")
        return self.runner.output(args, kwargs)

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
        check_own_loop(self.runner.stages, "engine.backward(loss)")
        self.runner.backward(loss, retain_graph=retain_graph)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside are not the last of an accumulation: their gradients are not summed over the data axes yet.

        The sum is made in the first :meth:`backward` outside, or in :meth:`step`. Until then every rank holds whole
        gradients: under ``zero`` from stage 2 on as many times its share of them as there are data ranks, and those where
        the optimizer's state lives. ``gradient_accumulation`` holds no more than the share, and sums every time.
        """
        check_own_loop(self.runner.stages, "engine.no_sync()")
        return self.runner.gradients.no_sync()

    @report_errors
    def step(self) -> bool:
        """End an accumulation: unscale, clip, and let optimizer and scheduler step; gradients are gone then.

        Returns:
            Whether the optimizer stepped: under fp16 a step whose gradients overflowed is left out.

        Raises:
            TrainingError: if there was no backward since the last step.
        """
        return self.runner.finish()

    def zero_grad(self) -> None:
        """Let go of the gradients since the last step; :meth:`step` does so by itself."""
        self.runner.forget()

    # -- evaluation ---------------------------------------------------------------------------------------------

    def eval_step(self, batch: Any) -> float:
        """The mean loss over all tokens of the global batch, without dropout and without training."""
        return self.eval_loss(batch)[0]

    @report_errors
    @torch.no_grad()
    def eval_loss(self, batch: Any) -> tuple[float, int]:
        """Return :meth:`eval_step`'s loss, and over how many targets it is a mean; nan and 0 if none counts."""
        forward = self.runner.forward
        work = forward.prepare(batch)
        shares = forward.shares(work, places=False)
        loss = all_reduce(forward.assess(work, shares) * shares.weight(), self.world.data_group)
        count = int(shares.total())
        return (float(loss) if count else math.nan), count

    @report_errors
    def count_targets(self, batch: Any) -> int:
        """Return how many targets of the global batch count in its loss."""
        forward = self.runner.forward
        return int(forward.shares(forward.prepare(batch), places=False).total())

    def predict(self, batch: Any) -> Any:
        """Return the model's output on a batch, whole on every rank, without dropout and without gradients."""
        forward = self.runner.forward
        work = forward.prepare(batch)
        if forward.shifts_labels:  # with labels, logits stay split over the vocabulary for the loss
            work.kwargs.pop("labels", None)
        with eval_mode(self.model), torch.no_grad():
            return self.generator(*work.args, **work.kwargs)

    @property
    def generator(self) -> Any:
        """The argument for :func:`meshfold.models.generate` on all ranks: the model, or the pipeline of its stages."""
        return self.model if self.pipeline is None else self.pipeline

    @property
    def residency(self) -> Residency | None:
        """Under ``zero``: what was planned of where the model's state lives, and what came of it; else None."""
        residency: Residency | None = self.states.residency
        return residency

    def print(self, *values: object, **options: Any) -> None:
        """Print on rank 0 alone, at once; arguments as of Python's ``print``. Any ranks may call."""
        if self.mesh.rank == 0:
            print(*values, **{"flush": True, **options})

    # -- data ---------------------------------------------------------------------------------------------------

    def shard_batch(self, global_batch: Any) -> Any:
        """This data coordinate's rows of a global batch, in the same form.

        Rows are dealt in order and as evenly as possible; a coordinate that gets none has a row that does not count.
        """
        return shard_batch(global_batch, self.world.row_index, self.world.row_size)

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
            index=self.world.row_index,
            blocks=self.world.row_size,
            shuffle=shuffle,
            seed=self.runner.seed if seed is None else seed,
            **options,
        )
        self.data_positions.follow(name, loader)
        return loader

    # -- state --------------------------------------------------------------------------------------------------

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return a single process's ``state_dict()``, on every rank and in CPU memory; all ranks must call.

        Under bf16 and fp16 trained parameters come as their float32 masters.
        """
        return self.model_state.full()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the whole model's state dict, the same on every rank.

        Raises:
            CheckpointError: if names or shapes are not the model's.
        """
        self.saver.before_change()
        self.runner.forward.weights_change()
        self.model_state.load(state)

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
        return save_checkpoint(self, path, asynchronous=asynchronous)

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
        load_checkpoint(self, path, weights_only=weights_only, verify=verify)

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
                self.saver.finish()
            else:  # the other ranks may not come
                self.saver.abandon()
        finally:
            self.runner.gradients.close()
            self._open.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
