"""``Trainer(strategy=MeshfoldStrategy(parallel=dict(...)))``: a LightningModule under a parallel spec."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.core.optimizer import _MockOptimizer  # Lightning's placeholder for no optimizer
from lightning.pytorch.trainer.states import TrainerFn
from meshfold.engine.model import AsGiven
from meshfold.engine.precision import ScaleSettings
from meshfold.engine.world import World
from meshfold.lightning.checkpoint_strategy import SESSION, CheckpointStrategy
from meshfold.lightning.environment import is_set_by_launcher
from meshfold.lightning.precision import MeshfoldPrecision
from meshfold.lightning.session import Session, recorded_init
from meshfold.lightning.strategy_processes import gather_metrics_over_data
from meshfold.mesh import ParallelSpec, SpecError

_DATA_PARALLEL: Mapping[str, object] = {}


class MeshfoldStrategy(CheckpointStrategy):
    """Trains a LightningModule under a parallel spec: data, tensor and sequence axes, and ``zero``.

    >>> strategy = MeshfoldStrategy(parallel=dict(data=2, tensor=2))              # doctest: +SKIP
    >>> Trainer(devices=4, strategy=strategy, precision="bf16-mixed").fit(module)   # doctest: +SKIP

    Ranks along tensor axes get the same rows; samplers, ``self.log(..., sync_dist=True)``, ``self.all_gather`` and
    metrics of torchmetrics go over the data coordinates, each once.

    Attributes:
        world: spec, mesh and device; None before the trainer has connected the processes.
        session: state of the module; None before it was set up.
    """

    strategy_name = "meshfold"

    def __init__(
        self,
        parallel: Mapping[str, object] | ParallelSpec = _DATA_PARALLEL,
        *,
        rules: Mapping[str, str] | None = None,
        seed: int | None = None,
        checkpoints: str = "folder",
        sharded_init: bool = True,
        outputs_fp32: bool | None = None,
        scale: ScaleSettings | None = None,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        """Args:
            parallel: the spec, as :class:`meshfold.engine.Engine` takes it; data parallel by default.
            rules: roles of submodules that tensor parallelism cannot infer, by full name in the LightningModule.
            seed: of modules that are made in ``configure_model``, and of dropout; by default what ``seed_everything`` set.
            checkpoints: ``"folder"``: sharded, written by all ranks; ``"file"``: Lightning's own file, with whole tensors.
            sharded_init: record what ``configure_model`` makes, so that each rank makes only its own blocks. False: it runs
                unchanged on every rank, for weights that are loaded inside.
            outputs_fp32: cast what the parts of the module return to float32; by default under mixed precision.
            scale: settings of the loss scale of ``precision="16-mixed"``.
            accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: as for every strategy.

        Raises:
            SpecError: for an invalid setting, before anything starts.
        """
        self._scale = scale
        self.world: World | None = None
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        spec = parallel if isinstance(parallel, ParallelSpec) else ParallelSpec.parse(parallel)
        _refuse_what_no_training_step_can(spec)
        if checkpoints not in ("folder", "file"):
            raise SpecError(f"checkpoints={checkpoints!r}: write 'folder' or 'file'")
        if checkpoints == "folder" and checkpoint_io is not None:
            raise SpecError(
                f"checkpoint_io={type(checkpoint_io).__name__} with checkpoints='folder': folders are written by all ranks, not "
                "through it. Write checkpoints='file', or leave it out"
            )
        self._parallel, self._rules, self._seed = parallel, rules, seed
        self._checkpoints, self._sharded_init, self._outputs_fp32 = checkpoints, sharded_init, outputs_fp32

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the name ``meshfold`` with the trainer."""
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(cls.strategy_name, cls, description=f"{cls.__name__}, of meshfold")

    # -- the module -----------------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Any:
        """Return the plugin for precision, clipping and steps."""
        return self._precision_plugin or MeshfoldPrecision()

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Any) -> None:
        if precision_plugin is not None:
            precision_plugin = MeshfoldPrecision.of(precision_plugin, self._scale)
        self._precision_plugin = precision_plugin

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Return an empty context: a module's construction is recorded, or runs on the CPU."""
        yield

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Context of ``configure_model``: modules are made on the meta device, and their initialisation is recorded."""
        if not self._sharded_init:
            yield
            return
        assert self._seed is not None  # set when the processes connected
        with recorded_init(self._seed):
            yield

    def setup(self, trainer: Any) -> None:
        """Split, fill, place and cast the module; make optimizers of this rank's part."""
        module = self.lightning_module
        assert self.accelerator is not None and module is not None  # the trainer has connected them
        self.accelerator.setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING and self._layer_sync and self.session is None:
            self.model = self._layer_sync.apply(module)
        self.model_to_device()
        session = self._on_mesh
        plugin = self.precision_plugin
        if trainer.state.fn == TrainerFn.FITTING:
            self._reset_optimizers_and_schedulers()

            def make() -> Any:
                self.setup_optimizers(trainer)
                return [optimizer for optimizer in self.optimizers if not isinstance(optimizer, _MockOptimizer)]

            session.train(make, accumulation=_most_micro_steps(trainer))
            self._take_over_calls()
        else:
            session.evaluate()
        self.setup_precision_plugin()
        plugin.units = session.units
        if self._world.row_size < self._world.mesh.world_size:
            gather_metrics_over_data(module, self._world)

    def setup_precision_plugin(self) -> None:
        """Do nothing: the module was cast when it was placed."""

    def model_to_device(self) -> None:
        """Put the module on the mesh if it is not on it yet.

        Raises:
            SpecError: if it was put there under another spec or precision, or has newer layers.
        """
        module, plugin = self.lightning_module, self.precision_plugin
        assert module is not None and self._seed is not None  # the trainer has connected module and processes
        session = self.session
        if session is None:
            widen = plugin.is_mixed if self._outputs_fp32 is None else self._outputs_fp32
            with AsGiven(module):
                session = Session(
                    module, self._world, plugin.engine, seed=self._seed, rules=self._rules, outputs_fp32=widen
                )
            setattr(module, SESSION, session)
        else:
            session.require_same(self._world, plugin.engine)

    def _take_over_calls(self) -> None:
        """Redirect ``zero_grad`` and ``toggle_optimizer``: their tensors are not where Lightning expects them."""
        module, session = self.lightning_module, self._on_mesh
        assert module is not None  # the trainer has connected it
        for wrapped in self._lightning_optimizers:
            for optimizer in (wrapped, wrapped._optimizer):
                object.__setattr__(optimizer, "zero_grad", _forgetting(session, wrapped._optimizer))
        object.__setattr__(module, "toggle_optimizer", lambda optimizer: session.toggle(optimizer))
        object.__setattr__(module, "untoggle_optimizer", lambda optimizer: session.untoggle(optimizer))

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Context manager: gradients inside wait until the last backward of an accumulation sums them over the data coordinates."""
        units = self._on_mesh.units
        before, units.sync = units.sync, False
        try:
            yield
        finally:
            units.sync = before

    # -- steps ----------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own training step on this data coordinate's batch."""
        session = self._on_mesh
        module = self.lightning_module
        if module is not None and module._trainer is not None:
            session.check_accumulation(module.trainer.accumulate_grad_batches)
        with session.micro_step((args, kwargs)):
            self.precision_plugin.units = session.units
            return self._run("training_step", self.precision_plugin.train_step_context(), args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own validation step."""
        return self._run("validation_step", self.precision_plugin.val_step_context(), args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own test step."""
        return self._run("test_step", self.precision_plugin.test_step_context(), args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own predict step."""
        return self._run("predict_step", self.precision_plugin.predict_step_context(), args, kwargs)

    def _run(self, name: str, context: AbstractContextManager[None], args: Any, kwargs: Any) -> Any:
        step: Callable[..., Any] = getattr(self.lightning_module, name)
        with context:
            return self._on_mesh.units.run(lambda: step(*args, **kwargs))

    # -- the end --------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """End a stage. Module and optimizers stay in place for the next one."""
        if self.cluster_environment is not None:
            size = os.environ.get("WORLD_SIZE") if is_set_by_launcher() else None
            self.cluster_environment.teardown()
            if size is not None:  # Lightning's method has deleted it
                os.environ["WORLD_SIZE"] = size
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def close(self) -> None:
        """Remove all hooks from the module and stop communicating: it keeps this rank's blocks, and cannot be trained."""
        if self.session is not None:
            self.session.close()
        if self.world is not None:
            self.world.mesh.close()


def _refuse_what_no_training_step_can(spec: ParallelSpec) -> None:
    spec.require_installed()
    if spec.pipeline is not None and spec.pipeline.size > 1:
        raise SpecError(
            f"pipeline={spec.pipeline.size} under Lightning: forward and backward of micro-batches take turns between the stages "
            "there, and a training_step is one forward of the whole module. Leave pipeline out (data, tensor, sequence and zero "
            "go), or train the same module with meshfold.engine.Engine(...).train_step(batch)"
        )


def _most_micro_steps(trainer: Any) -> int:
    """Return the largest number of micro-steps of any step, in this or a later epoch."""
    found = [int(trainer.accumulate_grad_batches)]
    for callback in trainer.callbacks:
        if isinstance(callback, GradientAccumulationScheduler):
            found += callback.scheduling.values()
    return max(found)


def _forgetting(session: Session, optimizer: Any) -> Callable[..., None]:
    def zero_grad(set_to_none: bool = True) -> None:
        unit = session.units.of(optimizer)
        if unit is not None:
            unit.forget()

    return zero_grad
