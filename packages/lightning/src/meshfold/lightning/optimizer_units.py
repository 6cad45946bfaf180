"""Optimizer units: each optimizer of a module, with the weights and gradients it trains and its state.

Gradients of several optimizers (a GAN's, say) arrive, are summed, clipped, used and freed independently. So each optimizer has its
own :class:`meshfold.engine.states.States`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from meshfold.engine import TrainingError
from meshfold.engine.optimizers import StepGuard, check_optimizer_class
from meshfold.engine.precision import LossScaler, Masters, Precision, cast_rest, other_dtypes
from meshfold.engine.states import Accumulation, PlainStates, Source, States, source_like
from meshfold.engine.world import World
from meshfold.mesh import SpecError
from meshfold.mesh.parameters import give

if TYPE_CHECKING:
    from meshfold.zero_gemini import BackwardRole


_BEHIND = (
    "was called behind the strategy's back, where gradients are not summed over the ranks yet: call step() of what "
    "self.optimizers() returns, and never with use_pl_optimizer=False"
)

_ADVICE = (
    "the strategy has the gradients. Between backward and the optimizer's step torch.nn.utils.clip_grad_norm_ and "
    "clip_grad_value_ work on self.parameters(), and parameter.grad can be multiplied in place; for all else write "
    "Trainer(gradient_clip_val=...) or self.clip_gradients(optimizer, ...)"
)


class PartialModule(nn.Module):
    """A module, or some of its children, whose call runs a function that runs them; states register hooks on it."""

    def __init__(self, module: nn.Module, children: Sequence[str] | None = None) -> None:
        """Args:
        module: whose parts it has, under their names.
        children: which; None for all, with the module's own parameters.
        """
        super().__init__()
        if children is None:
            self._parameters, self._modules = module._parameters, module._modules
            self._buffers = module._buffers
        else:
            for name in children:
                self.add_module(name, module.get_submodule(name))

    def forward(self, run: Any) -> Any:
        """Call the function and return its result."""
        return run()


class OptimizerUnit:
    """An optimizer with the states of its parameters."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        states: States,
        parameters: Mapping[str, nn.Parameter],
        given: Sequence[Sequence[str]],
        around: PartialModule | None,
        watched: Iterable[nn.Parameter] = (),
    ) -> None:
        """Args:
        optimizer: None for evaluation only.
        states: of the parameters.
        parameters: those of the module that are in its states, by full name.
        given: names of all parameters in each of the optimizer's groups as the user made them, frozen ones too.
        around: module with the states' hooks; None for none.
        watched: parameters that must stay frozen or trained, as now, for the states to be right.
        """
        self.optimizer, self.states, self.around = optimizer, states, around
        self.parameters, self.given = dict(parameters), [list(names) for names in given]
        self._watched = {p: p.requires_grad for p in watched}
        self.gradients = Accumulation(states, LossScaler(None), advice=_ADVICE, shows_none=False)
        self._guard = StepGuard(optimizer, _BEHIND)

    @property
    def is_as_made(self) -> bool:
        """True if no parameter was frozen, thawed or added since the unit was made."""
        groups = 0 if self.optimizer is None else len(self.optimizer.param_groups)
        return groups == len(self.given) and all(p.requires_grad == was for p, was in self._watched.items())

    def begin(self) -> None:
        """Prepare for a forward whose backward will follow."""
        if not self.gradients.settled:
            self.gradients.begin()

    @contextmanager
    def backward(self, kind: BackwardRole, scaler: LossScaler) -> Iterator[None]:
        """Context of a backward of a scaled loss, whose gradients are this unit's."""
        if self.gradients.settled:
            raise TrainingError(
                "a backward after clip_gradients() and before step(): gradients are complete once they were clipped. Clip after "
                "the last backward, or call optimizer.zero_grad() before this one"
            )
        self.gradients.scaler = scaler
        with self.gradients.taking(kind, made_by_all=False):  # the loss may be another optimizer's
            yield

    def clip(self, max_norm: float) -> None:
        """Clip all gradients by their norm, if there are any."""
        if self.gradients.backwards:
            with self.gradients.complete("the norm"):
                self.states.clip(max_norm)

    def clip_value(self, max_value: float) -> None:
        """Clip each element of the gradients, if there are any."""
        if self.gradients.backwards:
            with self.gradients.complete("clipping the values"):
                self.states.clip_value(max_value)

    def step(self, scaler: LossScaler, options: Mapping[str, Any]) -> None:
        """Step with complete gradients, unless they overflowed, and free them; does nothing without a backward."""
        if self.optimizer is None or not self.gradients.backwards:
            return
        self.gradients.finish()
        if not (scaler.moves and scaler.update(float(self.states.norm()))):
            with self._guard.opened():
                if not options:
                    self.states.step()
                elif self.around is None:
                    self.optimizer.step(**options)
                    self.states.publish()
                else:
                    raise TrainingError(
                        f"step({', '.join(options)}): under zero an optimizer's step takes no arguments"
                    )
        self.forget()

    def forget(self) -> None:
        """Free the gradients."""
        if self.gradients.backwards:
            self.gradients.forget()

    def close(self) -> None:
        """Remove the hooks from the parameters and the optimizer."""
        self._guard.close()
        self.gradients.close()
        self.states.close()


class OptimizerUnits:
    """All optimizer units of a module; a :class:`ModelState` reads and writes through them."""

    def __init__(self, units: Iterable[OptimizerUnit], world: World) -> None:
        self.all = list(units)
        self._world = world
        self.sync = True
        """Whether the next backward is the last of an accumulation, as far as one knows."""
        self.only: OptimizerUnit | None = None
        """The unit whose gradients count; None for all."""
        self._unit_of: dict[Tensor, OptimizerUnit] = {p: unit for unit in self.all for p in unit.parameters.values()}

    def __iter__(self) -> Iterator[OptimizerUnit]:
        return iter(self.all)

    @property
    def data_size(self) -> int:
        """Ranks that a loss is a mean over."""
        return self._world.data_size

    def of(self, optimizer: object) -> OptimizerUnit | None:
        """Return the unit of an optimizer, or of Lightning's wrapper of it."""
        inner = getattr(optimizer, "_optimizer", optimizer)
        return next((unit for unit in self.all if unit.optimizer is inner and inner is not None), None)

    def begin(self) -> None:
        """Prepare for a forward whose backward will follow."""
        for unit in self._active():
            unit.begin()

    @contextmanager
    def backward(self, scaler: LossScaler) -> Iterator[None]:
        """Context of a backward: gradients count, except those of optimizers that are toggled off."""
        with ExitStack() as inside:
            for unit in self._active():
                inside.enter_context(unit.backward("last" if self.sync else "more", scaler))
            yield

    def run(self, function: Any) -> Any:
        """Call a function in which the module's parts run."""
        call = function
        for unit in self.all:
            if unit.around is not None:
                call = _within(unit.around, call)
        return call()

    def close(self) -> None:
        """Close every unit."""
        for unit in self.all:
            unit.close()

    def _active(self) -> list[OptimizerUnit]:
        chosen = self.all if self.only is None else [self.only]
        return [unit for unit in chosen if unit.optimizer is not None]

    # -- state: what a ModelState asks of States --------------------------------------------------------------------

    @property
    def all_read(self) -> bool:
        """True if every rank must call ``Source.read``."""
        return any(unit.states.all_read for unit in self.all)

    def source(self, tensor: Tensor) -> Source:
        """Return the source of the master value of a parameter or buffer."""
        unit = self._unit_of.get(tensor)
        return source_like(tensor, tensor, self._world) if unit is None else unit.states.source(tensor)

    def write(self, tensor: Tensor, whole: Tensor) -> None:
        """Set the master value of a parameter or buffer; then call ``publish``."""
        unit = self._unit_of.get(tensor) or self.all[0]
        unit.states.write(tensor, whole)

    def publish(self) -> None:
        """Copy written values to the module."""
        for unit in self.all:
            unit.states.publish()


def _within(around: PartialModule, call: Any) -> Any:
    return lambda: around(call)


def named_groups(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> list[list[str]]:
    """Return the names of the parameters in each group of an optimizer.

    Raises:
        SpecError: for a tensor that is not a parameter of the module.
    """
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            if tensor not in names:
                raise SpecError(
                    f"configure_optimizers() gave {type(optimizer).__name__} a tensor of shape {tuple(tensor.shape)} that is not "
                    "a parameter of the module: give it what self.parameters() or a submodule's parameters() return then"
                )
    return [[names[p] for p in group["params"]] for group in optimizer.param_groups]


def check_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], given: Sequence[Sequence[Sequence[str]]], *, whole: bool
) -> None:
    """Refuse optimizers that cannot step shards; ``whole``: those that need whole matrices will have them.

    Raises:
        SpecError: for such an optimizer, and for a parameter that two optimizers train.
    """
    owner: dict[str, int] = {}
    for number, (optimizer, groups) in enumerate(zip(optimizers, given, strict=True)):
        check_optimizer_class(type(optimizer), type(optimizer).__name__, whole)
        for name in (name for names in groups for name in names):
            if owner.setdefault(name, number) != number:
                raise SpecError(
                    f"{name!r} is in optimizer {owner[name]} and in optimizer {number}: a parameter's gradient belongs to one "
                    "optimizer; make one optimizer with two parameter groups, or leave it out of one of them"
                )


def retarget(
    optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[Tensor]], now: Mapping[Tensor, Tensor]
) -> None:
    """Switch an optimizer to other tensors.

    Args:
        optimizer: stays the object that schedulers know.
        groups: its parameters from now on, group by group.
        now: old tensor to the new one that gets its state.
    """
    for group, members in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = list(members)
    for tensor in list(optimizer.state):
        if tensor in now and now[tensor] is not tensor:
            state = optimizer.state.pop(tensor)
            like = now[tensor]
            optimizer.state[like] = {
                key: value.to(like.dtype)
                if isinstance(value, Tensor) and value.shape == like.shape and value.is_floating_point()
                else value
                for key, value in state.items()
            }


class ReplicatedUnits:
    """Makes units without ``zero``: every data rank keeps all state of the parameters. The methods are those of ``ZeroUnits``.

    Attributes:
        in_chunks: False; units can be made again at any time.
    """

    in_chunks = False

    def __init__(self, module: nn.Module, world: World, precision: Precision) -> None:
        """Args:
        module: assembled.
        world: where it lies.
        precision: of the module.
        """
        self._module, self._world, self._precision = module, world, precision

    def release(self, units: OptimizerUnits) -> OptimizerUnits:
        """Copy master weights back to the parameters and give optimizers the parameters; return no units."""
        by_name = dict(self._module.named_parameters())
        for unit in units:
            unit.close()
            if not isinstance(unit.states, PlainStates):
                continue
            masters = unit.states.masters
            back: dict[Tensor, Tensor] = {masters.of(p): p for p in unit.parameters.values()}
            for master, parameter in back.items():
                give(parameter, master.detach())
            if unit.optimizer is not None:
                added = [group["params"] for group in unit.optimizer.param_groups[len(unit.given) :]]
                groups = [[by_name[name] for name in names] for names in unit.given]
                retarget(unit.optimizer, [*groups, *added], back)
        return OptimizerUnits([], self._world)

    def stand_ins(self) -> AbstractContextManager[None]:
        """Return an empty context: optimizers are made of the parameters themselves."""
        return nullcontext()

    def make(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        given: Sequence[list[list[str]]],
        *,
        before: Sequence[OptimizerUnit],
        accumulation: int,
    ) -> list[OptimizerUnit]:
        """Return a unit for each optimizer; without any, one to evaluate with.

        Args:
            optimizers: of the parameters; from then on they step the master weights.
            given: names of the parameters in their groups.
            before: none, since they were released.
            accumulation: makes no difference here.
        """
        made = [self._unit(*pair) for pair in zip(optimizers, given, strict=True)]
        made = made or [self._unit(None, [])]
        cast_rest(self._module, self._precision, {p for unit in made for p in unit.parameters.values()})
        return made

    def _unit(self, optimizer: torch.optim.Optimizer | None, given: list[list[str]]) -> OptimizerUnit:
        """Return the unit of an optimizer's parameters; without an optimizer, of all parameters that could be trained."""
        by_name = dict(self._module.named_parameters())
        chosen = [by_name[name] for names in given for name in names] if optimizer else [*by_name.values()]
        mine = {name: p for name, p in by_name.items() if p.requires_grad and any(p is c for c in chosen)}
        masters = Masters(mine.values(), self._precision, other_dtypes(self._module, self._precision))

        def made(targets: Any) -> torch.optim.Optimizer:
            assert optimizer is not None  # without an optimizer there is nothing to make
            groups = [[masters.of(mine[name]) for name in names if name in mine] for names in given]
            retarget(optimizer, groups, {p: masters.of(p) for p in mine.values()})
            return optimizer

        states = PlainStates(mine, masters, self._world, made if optimizer else None)
        return OptimizerUnit(optimizer, states, mine, given, None, chosen if optimizer else ())
