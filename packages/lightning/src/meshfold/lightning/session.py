"""A LightningModule on the mesh: split, placed and cast once, with the optimizer units of the stage that runs.

The same module may be validated, fitted, tested and fitted again; only the units are made again, from the master weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._pytree import tree_leaves, tree_map

from meshfold.engine.assembly import assemble, has_dropout
from meshfold.engine.batches import Batch, Shares, randomness
from meshfold.engine.checkpoints import ModelState
from meshfold.engine.model import callable_parts, roots_of
from meshfold.engine.precision import Precision
from meshfold.engine.sequence import split_sequence
from meshfold.engine.world import World
from meshfold.lightning.optimizer_units import OptimizerUnits, ReplicatedUnits, check_optimizers, named_groups
from meshfold.mesh import SpecError, metadata
from meshfold.mesh.initialization import ValueSource, record_initialization, set_value_source
from meshfold.mesh.model_io import LossMean

if TYPE_CHECKING:
    from meshfold.lightning.zero_units import ZeroUnits

Optimizers = Sequence[torch.optim.Optimizer]


class Session:
    """The strategy's state for a module; it lives as long as the module.

    Attributes:
        world: where it lies.
        precision: in which it computes.
        report: what tensor parallelism did; None if it was left whole.
        units: of the stage that runs.
    """

    def __init__(
        self,
        module: nn.Module,
        world: World,
        precision: Precision,
        *,
        seed: int,
        rules: Mapping[str, str] | None = None,
        outputs_fp32: bool = False,
    ) -> None:
        """Split, fill, place and cast a module.

        Args:
            module: with real parameters, which all ranks take from rank 0, or recorded ones on the meta device.
            world: where it will lie.
            precision: in which it will compute.
            seed: of recorded parameters and of dropout.
            rules: roles of submodules by full name, for tensor parallelism.
            outputs_fp32: cast the outputs of its parts to float32.

        Raises:
            SpecError: if its sizes do not fit the spec, or it has no parameters.
        """
        if next(module.parameters(), None) is None:
            raise SpecError(
                f"{type(module).__name__} has no parameters when the strategy sets it up: make its layers in __init__ or in "
                "configure_model()"
            )
        self.module, self.world, self.precision, self._seed = module, world, precision, seed
        self._drops = has_dropout(module)
        roots = roots_of(module)
        if len(roots) > 1 and world.row_size < world.data_size:
            raise SpecError(
                f"sequence with a module of several models ({', '.join(roots)}): whole sequences go into one model and come out of "
                "it. Put them into one submodule, or leave sequence out"
            )
        built = assemble(module, world, precision, seed, rules, roots=roots)
        self._sequence = split_sequence(module.get_submodule(roots[0]), world, own_loss=True)
        self.report, self._torch_dropout = built.report, built.torch_dropout
        self._steps, self._most_micro_steps = 0, 1
        self.units = OptimizerUnits([], world)
        self._toggled: list[nn.Parameter] = []
        self._maker: ReplicatedUnits | ZeroUnits = ReplicatedUnits(module, world, precision)
        if world.spec.zero is not None:
            from meshfold.lightning.zero_units import ZeroUnits

            self._maker = ZeroUnits(module, world, precision, seed=seed, values=built.values)
        self._handles = []

        def enter(
            part: nn.Module, args: Any
        ) -> None:  # not a method: copies of the module keep their hooks, which must not hold this object
            if torch.is_grad_enabled() and part.training:
                self.units.begin()

        for part in callable_parts(module):
            self._handles.append(part.register_forward_pre_hook(enter, prepend=True))
            if outputs_fp32 and precision.dtype.itemsize == 2:
                self._handles.append(part.register_forward_hook(_to_float32))
        if precision.dtype != torch.float32:
            self._cast_inputs()

    def __deepcopy__(self, memo: object) -> None:
        """Return None: a copy is a plain module with this rank's blocks."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())

    def require_same(self, world: World, precision: Precision) -> None:
        """Check that a trainer that uses the module again needs the same setup.

        Raises:
            SpecError: under another spec or precision, or if the module has new parameters.
        """
        if dict(world.spec.axes) != dict(self.world.spec.axes) or world.spec.zero != self.world.spec.zero:
            raise SpecError(
                f"{type(self.module).__name__} was set up for {self.world.spec} by an earlier trainer, and this one needs "
                f"{world.spec}: build the module again and load the state, trainer.fit(module, ckpt_path=...)"
            )
        if (precision.dtype, precision.master_dtype) != (self.precision.dtype, self.precision.master_dtype):
            raise SpecError(
                f"{type(self.module).__name__} was set up for {self.precision.dtype} by an earlier trainer, and this one needs "
                f"{precision.dtype}: build the module again and load the state, trainer.fit(module, ckpt_path=...)"
            )
        new = [name for name, p in self.module.named_parameters() if metadata(p) is None]
        if new:
            raise SpecError(
                f"{new[0]!r} was made after the module was set up: configure_model() is called for every stage and must do "
                "nothing the second time; begin it with 'if self.model is not None: return'"
            )

    # -- units ------------------------------------------------------------------------------------------------------

    def evaluate(self) -> None:
        """Prepare to run without training, if nothing is prepared yet."""
        if not self.units.all:
            self._replace_units([], [], accumulation=1)

    def train(self, make: Callable[[], Optimizers], *, accumulation: int) -> None:
        """Prepare to train.

        Args:
            make: makes the optimizers, of the module's parameters; they are these units' from then on.
            accumulation: micro-steps of an optimizer step.

        Raises:
            SpecError: for optimizers that cannot step shards.
        """
        self.units = self._maker.release(self.units)
        with self._maker.stand_ins():
            optimizers = make()
            names: dict[Tensor, str] = {p: name for name, p in self.module.named_parameters()}
            given = [named_groups(optimizer, names) for optimizer in optimizers]
        check_optimizers(optimizers, given, whole=self._maker.in_chunks)
        self._most_micro_steps = accumulation
        self._replace_units(optimizers, given, accumulation=accumulation)

    def _replace_units(self, optimizers: Optimizers, given: Sequence[list[list[str]]], *, accumulation: int) -> None:
        made = self._maker.make(optimizers, given, before=self.units.all, accumulation=accumulation)
        self.units = OptimizerUnits(made, self.world)

    def check_accumulation(self, micro_steps: int) -> None:
        """Check that a step has no more micro-steps than chunks were laid out for.

        Raises:
            SpecError: if it has, under ``zero``.
        """
        if self._maker.in_chunks and micro_steps > self._most_micro_steps:
            raise SpecError(
                f"accumulate_grad_batches grew from {self._most_micro_steps} to {micro_steps} while the fit runs: under zero "
                "memory is laid out when the fit starts. Say it before, with GradientAccumulationScheduler(scheduling={0: 1, 4: "
                f"{micro_steps}}}), or leave zero out of the spec"
            )

    def refresh(self) -> None:
        """Update the units, between steps, for parameters that were frozen, unfrozen or added to an optimizer.

        Raises:
            SpecError: under ``zero``, since chunks are laid out when the fit starts.
        """
        if self.units.only is not None or all(unit.is_as_made for unit in self.units):
            return
        if self._maker.in_chunks:
            raise SpecError(
                "parameters were frozen, thawed or added to an optimizer while the fit runs: under zero what is trained is laid "
                "out when the fit starts. Do it before trainer.fit(), or leave zero out of the spec"
            )
        optimizers = [unit.optimizer for unit in self.units if unit.optimizer is not None]
        self.train(lambda: optimizers, accumulation=1)

    def toggle(self, optimizer: Any) -> None:
        """Do what ``LightningModule.toggle_optimizer`` does: gradients count for only one optimizer."""
        self.units.only = self.units.of(optimizer)
        others = [unit for unit in self.units if unit is not self.units.only]
        self._toggled = [p for unit in others for p in unit.parameters.values() if p.requires_grad]
        for parameter in self._toggled:
            parameter.requires_grad = False

    def untoggle(self, optimizer: Any) -> None:
        """Undo ``toggle``."""
        for parameter in self._toggled:
            parameter.requires_grad = True
        self._toggled, self.units.only = [], None

    def close(self) -> None:
        """Remove all hooks from the module."""
        self.units.close()
        for name in ("toggle_optimizer", "untoggle_optimizer"):
            vars(self.module).pop(name, None)
        if self._sequence is not None:
            self._sequence.close()
        for handle in self._handles:
            handle.remove()

    # -- running ----------------------------------------------------------------------------------------------------

    @contextmanager
    def micro_step(self, batch: Any) -> Iterator[None]:
        """Context of a training step: gradients may arrive, and dropout is by global element."""
        self.refresh()
        self.units.begin()
        with self._random(batch):
            yield
        self._steps += 1

    def _random(self, batch: Any) -> AbstractContextManager[object]:
        rows = next((x for x in tree_leaves(batch) if isinstance(x, Tensor) and x.dim()), None)
        if not self._drops or rows is None:
            return nullcontext()
        work = Batch(args=(rows,), kwargs={}, given=None, rows=rows.shape[0], targets=None)
        shares = Shares(work, self.world, mean=LossMean.ROWS, places=True)
        return randomness(self._seed, self._steps, shares, self.world.device, torch_too=self._torch_dropout)

    def _cast_inputs(self) -> None:
        """Cast the inputs of every module with parameters to their dtype, since code between modules may be in float32."""
        dtype = self.precision.dtype

        def cast(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return _cast(args, dtype), _cast(kwargs, dtype)

        for module in self.module.modules():
            if module is not self.module and any(p is not None for p in module._parameters.values()):
                handle = module.register_forward_pre_hook(cast, with_kwargs=True, prepend=True)
                self._handles.append(handle)

    # -- state ------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> ModelState:
        """The whole module's state."""
        return ModelState(self.module, self.units, self.world)  # type: ignore[arg-type]

    @property
    def steps(self) -> int:
        """Number of trained micro-steps so far, which dropout depends on."""
        return self._steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._steps = steps


@contextmanager
def recorded_init(seed: int) -> Iterator[None]:
    """Context in which modules are made on the meta device, and initialisation is recorded.

    Like :class:`meshfold.zero_gemini.ShardedInit`, without that package.
    """
    with record_initialization() as trace:
        origin = ValueSource(trace=trace, seed=seed)

        def note(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            if parameter is not None and trace.recording.knows(parameter):
                set_value_source(parameter, origin)

        handle = register_module_parameter_registration_hook(note)
        try:
            yield
        finally:
            handle.remove()


def _cast(found: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in a value."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tree_map(cast, found)


def _to_float32(module: nn.Module, args: Any, output: Any) -> Any:
    return _cast(output, torch.float32)
