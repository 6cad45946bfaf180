"""The engine: a model, one line of spec, and a train step that can be read from top to bottom."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from meshfold.engine import evaluation
from meshfold.engine.assembly.arguments import Arguments
from meshfold.engine.assembly.auto_spec import resolve_arguments
from meshfold.engine.assembly.build import build
from meshfold.engine.batches.loader import DataPositions, ShardedLoader
from meshfold.engine.checkpoints.saving import BackgroundSave, Saver
from meshfold.engine.lifetime import Lifetime, refuse_after_close
from meshfold.engine.model.pipelined_model import check_own_loop
from meshfold.engine.moved import integration
from meshfold.engine.persistence import load_checkpoint, save_checkpoint
from meshfold.engine.train_step import TrainStep
from meshfold.mesh import ParallelSpec
from meshfold.mesh.watchdog import report_errors

if TYPE_CHECKING:
    from meshfold.engine.step_metrics import StepMetrics
    from meshfold.engine.zero.capture_rules import CaptureReport
    from meshfold.engine.zero.residency import Residency

_DATA_PARALLEL: Mapping[str, object] = {}


@refuse_after_close
class Engine:
    """Trains a model under a parallel spec.

    >>> engine = Engine(model, parallel=dict(data=2, tensor=4), optimizer=dict(name="adamw", lr=3e-4))  # doctest: +SKIP
    >>> loss = engine.train_step(batch)                                                                 # doctest: +SKIP

    Attributes:
        model: this rank's part of the model.
        mesh: the ranks, by named axes.
        spec: the checked spec.
        report: what tensor parallelism did to each submodule; None if the model was left whole.
        loaded: how the weights of a Hugging Face folder matched the model; None without a folder.
        compiled_blocks: what ``compile`` compiled; its ``str()`` is one line. None if nothing was compiled.
        fp8_layers: the linear layers that multiply in fp8, and why others do not, to be printed; None if fp8 is off.
        optimizer: holds the master weights of this rank's shards. Only :meth:`step` and :meth:`train_step` step it; its own
            ``step()`` raises a TrainingError. None for evaluation only.
        pipeline: runs the stages of the model under ``pipeline``; calling it computes no gradients. None without ``pipeline``.

    Attributes for packages that build on the engine:
        world: the ranks that hold each part of the model, and the groups that they communicate in.
        precision: the checked argument.
        states: weights, gradients and optimizer state.
        model_state: the state of the whole model, in the form that checkpoints store.
        runner: forward, backward and the optimizer's step.
        recomputed_blocks: the blocks that backward recomputes; None without.
        fused_kernels: the fused kernels in the model, to be printed; None with ``kernels="off"``.
        saver: background saves.
        data_positions: positions of the loaders that checkpoints include.
        lifetime: what :meth:`close` closes.
    """

    @report_errors
    @resolve_arguments
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
        cuda_graph: object = False,
        example: Any = None,
        nonfinite: str | None = None,
        watchdog: float | None = None,
        check_collectives: bool | None = None,
    ) -> None:
        """Args:
            model: a module (rank 0's weights are used); a function that builds one, which is then never materialised whole
                and starts from the same weights under every spec; or :func:`meshfold.engine.pretrained` of a Hugging Face
                folder, whose weights are read directly into their shards.
            parallel: the spec, as in ``dict(data=2, tensor=dict(mode="2d", size=4))``, or ``"auto"``: the best for ``example``.
            optimizer: ``dict(name="adamw", lr=...)``, or a class or function of the parameters. None: evaluation only.
            precision: ``"fp32"``, ``"fp64"``, ``"bf16"``, ``"fp16"``, ``dict(name="fp16", initial_scale=...)``, or
                ``dict(name="bf16", matmul="fp8", recipe=..., keep=("head", "router"))`` for linear layers in fp8.
            clip_grad_norm: maximum norm of the whole model's gradient.
            clip_norm_type: which norm: 2.0, 1.0 or math.inf.
            clip_grad_value: maximum absolute value of a gradient's element; not with ``clip_grad_norm``.
            gradient_accumulation: calls of ``train_step`` per optimizer step.
            loss_fn: ``loss_fn(output, batch)`` returns the mean over the batch's targets; the model is then called without
                ``labels`` if it can be, except by one with ``batch_fields``, entries that it alone reads. None: ``output.loss``.
            lr_scheduler: function that makes a torch scheduler for the optimizer.
            seed: of initial weights, dropout and the order of data.
            device: by default this rank's GPU, or the CPU.
            rules: roles of submodules that tensor parallelism cannot infer from name and shape.
            recompute: what backward recomputes: every repeated block (``"blocks"``), all of it but attention
                (``"but-attention"``), or what the plan of ``zero=dict(placement="auto")`` says (``"auto"``); None: up to the model.
            kernels: replaces the model's own operations by fused kernels (:func:`meshfold.kernels.fuse.fuse`): ``"auto"`` (where
                they are faster), ``"off"``, or a dict with names of rules, as in ``dict(loss=False)``.
            compile: True, or ``dict(backend=..., mode=..., dynamic=..., options=...)``: torch.compile compiles every repeated
                block, one by one. A model without repeated blocks is compiled as a whole, except under ``zero`` and ``pipeline``.
            cuda_graph: replay forward and backward of ``train_step`` as one CUDA graph per shape of batch (``zero``: several),
                for models whose kernels take longer to launch than to run. For data parallelism or one GPU, without dropout.
            example: a batch of any values by which ``pipeline`` partitions a model whose input is not token ids; else only checked.
            nonfinite: what to do if the loss or the gradient of a step is nan or infinite: ``"error"``, ``"skip"`` the step, or
                ``"report"`` and step; each reports where it arose. None: no check.
            watchdog: seconds after which an unfinished collective ends the job; the error names the ranks that did not join
                it (default: ``MESHFOLD_WATCHDOG``, else 600). 0 turns it off.
            check_collectives: compare the kind, shape and dtype of every collective among its ranks before it runs; slow
                (default: True if ``MESHFOLD_DEBUG=collectives``).

        Raises:
            SpecError: for an invalid setting or an unknown argument, before anything starts.
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
            cuda_graph=cuda_graph,
        )
        with ExitStack() as opened:  # closed in reverse order
            built = build(
                self, model, parallel, asked, opened, device=device, rules=rules, recompute=recompute, example=example
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
            self.lifetime = Lifetime(opened.pop_all(), self.saver, self.runner.gradients)  # close() closes them

    # -- training -----------------------------------------------------------------------------------------------

    @report_errors
    def train_step(self, batch: Any) -> float:
        """Run one micro-step on this data coordinate's batch; every ``gradient_accumulation``-th call steps the optimizer.

        A micro-step's gradient is of the mean loss over all tokens of the global batch, even if ranks have different numbers of
        tokens. Micro-steps are averaged.

        Returns:
            The mean loss over all tokens of the global batch, the same on every rank; nan if no token counts.

        Raises:
            SpecError: for a batch the model cannot be called with.
            TrainingError: without an optimizer.
        """
        self.run_step(batch)
        return self.runner.last.loss  # type: ignore[union-attr]  # there is a step

    @report_errors
    def run_step(self, batch: Any) -> None:
        """Run :meth:`train_step` without reading its loss: the host does not wait for the device until :attr:`last` is read."""
        self.runner.run(batch)

    @property
    def steps(self) -> int:
        """Optimizer steps so far."""
        return self.runner.steps

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps skipped so far, because of an overflow or by ``nonfinite="skip"``."""
        return self.runner.skipped_steps

    @property
    def micro_step(self) -> int:
        """Training forwards so far: calls of :meth:`train_step`, or of the engine itself."""
        return self.runner.micro_step

    @property
    def lr_scheduler(self) -> Any:
        """Scheduler that is stepped after each optimizer step, or None."""
        return self.runner.lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: Any) -> None:
        self.runner.lr_scheduler = scheduler

    @property
    def last(self) -> StepMetrics | None:
        """Metrics of the last :meth:`train_step` or :meth:`step`; None before the first."""
        return self.runner.last

    # The parts of a train step, for custom training loops.
    @report_errors
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output on this rank's inputs, in training mode, with dropout.

        Tensors are moved to the device, and floating-point ones cast to the model's precision. Each call uses new dropout
        masks. The rows of the first tensor are this data coordinate's part of the global batch. For evaluation call
        ``engine.model`` in eval mode under ``torch.no_grad()``.
        """
        check_own_loop(self.runner.stages, "engine(...)")
        return self.runner.output(args, kwargs)

    @report_errors
    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Add the gradient of a loss to those for the next :meth:`step`; call it once for each loss.

        ``loss`` is a mean over this rank's own batch, and the engine averages over the data ranks. This equals the serial
        gradient if all data ranks have the same number of rows. Gradients of several backwards are summed, as in torch.
        Gradients that reach this model in another way, such as a backward of another engine through it, do not count.

        Gradients are summed over the data axes during backward, except inside :meth:`no_sync`. All ranks must call;
        a parameter that a rank's loss does not depend on has a zero gradient there.

        Args:
            loss: a scalar; the engine multiplies it by the loss scale.
            retain_graph: keep the graph for another backward through the same forward.

        Raises:
            SpecError: if the loss is not a scalar, or does not depend on parameters.
            TrainingError: without an optimizer.
        """
        check_own_loop(self.runner.stages, "engine.backward(loss)")
        self.runner.backward(loss, retain_graph=retain_graph)

    def no_sync(self) -> AbstractContextManager[None]:
        """Context manager: backwards inside do not sum gradients over the data axes.

        The first :meth:`backward` outside, or :meth:`step`, sums them. Until then every rank holds whole gradients. Under
        ``zero`` stages 2 and 3 they are stored with the optimizer state, and are larger than a shard by a factor of the data
        ranks. ``gradient_accumulation`` keeps only the shard, and reduces in every micro-step.
        """
        check_own_loop(self.runner.stages, "engine.no_sync()")
        return self.runner.gradients.no_sync()

    @report_errors
    def step(self) -> bool:
        """End an accumulation: unscale, clip, step the optimizer and the scheduler, and release the gradients.

        Returns:
            True if the optimizer stepped; False if the step was skipped, as under fp16 when gradients overflow.

        Raises:
            TrainingError: if there was no backward since the last step.
        """
        return self.runner.finish()

    def zero_grad(self) -> None:
        """Release the gradients since the last step; :meth:`step` does this itself."""
        self.runner.forget()

    # -- evaluation ---------------------------------------------------------------------------------------------

    def eval_step(self, batch: Any) -> float:
        """Return the mean loss over all tokens of the global batch, without dropout and gradients."""
        return self.eval_loss(batch)[0]

    @report_errors
    def eval_loss(self, batch: Any) -> tuple[float, int]:
        """Return the loss of :meth:`eval_step` and the number of targets that it is the mean of; nan and 0 if none counts."""
        return evaluation.eval_loss(self, batch)

    @report_errors
    def count_targets(self, batch: Any) -> int:
        """Return how many targets of the global batch count in its loss."""
        return evaluation.count_targets(self, batch)

    def predict(self, batch: Any) -> Any:
        """Return the model's output on a batch, whole on every rank, without dropout and without gradients."""
        return evaluation.predict(self, batch)

    @property
    def generator(self) -> Any:
        """The argument for :func:`meshfold.models.generate` on all ranks: the model, or the pipeline of its stages."""
        return self.model if self.pipeline is None else self.pipeline

    @property
    def residency(self) -> Residency | None:
        """Plan of the model's state in memory under ``zero``, with its measurements; None without ``zero``."""
        return self.states.residency  # type: ignore[no-any-return]

    @property
    def capture(self) -> CaptureReport | None:
        """Steps replayed as graphs under ``zero``, and why the last one was not; None without ``cuda_graph``."""
        return self.runner.capture

    def print(self, *values: object, **options: Any) -> None:
        """Print on rank 0 only and flush; arguments as for Python's ``print``. It is not a collective."""
        if self.mesh.rank == 0:
            print(*values, **{"flush": True, **options})

    # -- data ---------------------------------------------------------------------------------------------------

    def shard_batch(self, global_batch: Any) -> Any:
        """Return this data coordinate's rows of a global batch, in the same structure.

        Coordinates get consecutive rows, as evenly as possible. One without rows gets a row that does not count.
        """
        return self.runner.forward.rows.cut(global_batch)

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
        """Return a loader that yields this rank's rows of global batches, which are the same under every spec.

        Args:
            dataset: map-style: it has a length, and an example for each index.
            batch_size: rows of the *global* batch of one micro-step.
            shuffle: use a new order in each epoch.
            seed: of the shuffling; by default the engine's.
            name: under which checkpoints store the position.
            options: ``drop_last``, and arguments of torch.utils.data.DataLoader.
        """
        index, blocks = self.runner.forward.rows.part()
        loader = ShardedLoader(
            dataset,
            batch_size=batch_size,
            index=index,
            blocks=blocks,
            shuffle=shuffle,
            seed=self.runner.seed if seed is None else seed,
            **options,
        )
        return self.data_positions.follow(name, loader)

    # -- state --------------------------------------------------------------------------------------------------

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return a single process's ``state_dict()``, on every rank and in CPU memory; all ranks must call.

        Under bf16 and fp16, trained parameters are returned as their float32 master weights.
        """
        return self.model_state.full()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the whole model's state dict, the same on every rank.

        Raises:
            CheckpointError: if names or shapes do not match the model.
        """
        self.saver.before_change()
        self.runner.forward.weights_change()
        self.model_state.load(state)

    def save(self, path: str | os.PathLike[str], *, asynchronous: bool = False) -> BackgroundSave | None:
        """Write a checkpoint folder that can be loaded under any other spec; all ranks must call.

        Args:
            path: the folder.
            asynchronous: copy this rank's state to host memory, and write it while training continues. The result has
                ``wait()``, ``done`` and ``error``, which you need not check: the next step, save, load or close raises an error
                of the save on all ranks, and a later save waits for this one. Until it is complete, the previous checkpoint stays.

        Raises:
            CheckpointError: in the middle of an accumulation, or if a rank cannot write.
        """
        return save_checkpoint(self, path, asynchronous=asynchronous)

    def load(self, path: str | os.PathLike[str], *, weights_only: bool = False, verify: bool = True) -> None:
        """Resume from a checkpoint saved under any spec; all ranks must call. Gradients since the last step are released.

        Args:
            path: the folder.
            weights_only: load the model only; optimizer, counters and data positions keep their values.
            verify: first compare every tensor with its checksum; the ranks divide this work.

        Raises:
            CheckpointError: if it does not exist, is damaged, belongs to another model or optimizer, or has no optimizer state;
                nothing has changed then.
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
        """Write the model as a folder that transformers loads; all ranks must call. No rank ever holds the whole model.

        Meshfold's own GPT and Llama are written as GPT-2 and Llama, or as Mistral if the model has a sliding window.

        Args:
            folder: must not exist, or be empty.
            like: a Hugging Face folder, such as the one that the model was loaded from: its tokenizer files are copied, and each
                tensor gets the dtype that it has there.
            dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"`` for all floating-point tensors; None: as in ``like``. Without
                ``like`` the dtypes of the model, but float32 for trained parameters under bf16 and fp16.
            shard_bytes: maximum size of a file of weights, except for a larger tensor.

        Raises:
            CheckpointError: if it cannot be written, or transformers has no such model.
        """
        integration("meshfold.huggingface").save_hugging_face(
            self, folder, like=like, dtype=dtype, shard_bytes=shard_bytes
        )

    # -- the end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release the mesh's process groups and remove the hooks from the model. The default process group stays.

        The model keeps this rank's parameters: all of them, or its shards under ``tensor`` and ``pipeline``. Under ``zero`` stage
        3 the shards are released too: call :meth:`full_state_dict` before.

        Waits for a save in progress; if it failed, all ranks raise its error. May be called twice. Other methods, except
        :meth:`print`, raise a TrainingError afterwards; attributes can still be read.
        """
        self.lifetime.end()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
