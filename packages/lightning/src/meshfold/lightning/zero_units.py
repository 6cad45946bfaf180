"""The units of a module under ``zero``: each optimizer's part of the module in separate chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from meshfold.engine.optimizers import Factory
from meshfold.engine.precision import Precision
from meshfold.engine.world import World
from meshfold.engine.zero import ZeroStates
from meshfold.lightning.optimizer_units import OptimizerUnit, OptimizerUnits, PartialModule, retarget
from meshfold.mesh import SpecError
from meshfold.mesh.initialization import ParameterInit
from meshfold.mesh.parameters import metadata_on, uncompiled_name


class ZeroUnits:
    """Maker of units whose weights, gradients and optimizer state are in chunks, also from earlier units.

    Attributes:
        in_chunks: True; units do not change during a fit.
    """

    in_chunks = True

    def __init__(
        self,
        module: nn.Module,
        world: World,
        precision: Precision,
        *,
        seed: int,
        values: ParameterInit | None,
    ) -> None:
        """Args:
        module: assembled; its parameters may be on the meta device.
        world: where it lies.
        precision: of the module.
        seed: of stochastic rounding.
        values: the first values of parameters on the meta device.
        """
        self._module, self._world, self._precision = module, world, precision
        self._seed, self._values = seed, values
        self._held_back: set[str] = set()  # parameters without an optimizer, frozen for now

    def release(self, units: OptimizerUnits) -> OptimizerUnits:
        """Return the units unchanged: they are kept until :meth:`make` has taken over their weights."""
        return units

    @contextmanager
    def stand_ins(self) -> Iterator[None]:
        """Context manager: replace every parameter of the module by a CPU stand-in of its shape that takes no memory.

        Optimizers can then be created for parameters that are on the meta device or released.
        """
        for name, known in self._module.named_parameters():
            known.requires_grad = known.requires_grad or name in self._held_back
        self._held_back.clear()
        made: dict[nn.Parameter, nn.Parameter] = {}
        places: list[tuple[nn.Module, str, nn.Parameter]] = []
        for module in self._module.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    places.append((module, name, parameter))
        for module, name, own in places:
            if own not in made:
                empty = torch.empty((), dtype=torch.float32, device="cpu").expand(self._shape(own))
                made[own] = nn.Parameter(empty, requires_grad=own.requires_grad)
            module._parameters[name] = made[own]
        try:
            yield
        finally:
            for module, name, own in places:
                own.requires_grad = made[own].requires_grad  # user code may have frozen it
                module._parameters[name] = own

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
            optimizers: of stand-ins; from then on they step shards.
            given: names of the parameters in their groups.
            before: the units until now, whose master weights are taken over; they are closed.
            accumulation: micro-steps of an optimizer step.

        Raises:
            SpecError: if optimizers train parts of one submodule, or several of them need a plan.
        """
        spec = self._world.spec.zero
        if len(optimizers) > 1 and spec is not None and spec.placement == "auto":
            raise SpecError(
                f"zero=dict(placement='auto') with {len(optimizers)} optimizers: the plan is made for one. Write placement='cuda' "
                "or placement='cpu'"
            )
        shares = self._shares(given)
        values = self._values if not before else self._take_over(before)
        owned = {name for groups in given for names in groups for name in names}
        for name, parameter in self._module.named_parameters():
            if optimizers and name not in owned and parameter.requires_grad:
                self._held_back.add(name)
                parameter.requires_grad = False
        units = []
        for number, children in enumerate(shares):
            around = PartialModule(self._module, children)
            groups = given[number] if optimizers else []
            make = _factory(around, optimizers[number], groups) if optimizers else self._keeper()
            states = ZeroStates(
                around, self._world, self._precision, make, accumulation=accumulation, seed=self._seed, values=values
            )
            mine = dict(around.named_parameters())
            optimizer = optimizers[number] if optimizers else None
            units.append(OptimizerUnit(optimizer, states, mine, groups, around, mine.values() if optimizer else ()))
        for unit in before:
            unit.close()
        return units

    def _keeper(self) -> Factory | None:
        """Return an optimizer that never steps, for evaluation; without one the master weights would stay rounded."""
        if self._precision.dtype == self._precision.master_dtype:
            return None
        return lambda parameters: torch.optim.SGD(parameters, lr=0.0)

    def _shares(self, given: Sequence[list[list[str]]]) -> list[list[str] | None]:
        """Return the children of the module that each optimizer trains; None for all of the module."""
        if len(given) < 2:
            return [None]
        owner = {name: number for number, groups in enumerate(given) for names in groups for name in names}
        if own := [name for name, p in self._module._parameters.items() if p is not None]:
            raise SpecError(
                f"{own[0]!r} is a parameter of {type(self._module).__name__} itself: under zero several optimizers train whole "
                "submodules. Put it into a submodule, or leave zero out of the spec"
            )
        shares: list[list[str] | None] = [[] for _ in given]
        first_uses: dict[nn.Parameter, tuple[int, str]] = {}
        for child, part in self._module.named_children():
            names = {f"{child}.{name}" for name, _ in part.named_parameters()}
            found = sorted({owner[name] for name in names if name in owner})
            if len(found) > 1:
                raise SpecError(
                    f"{child!r} is trained by optimizers {found[0]} and {found[1]}: under zero an optimizer trains whole "
                    "submodules. Split it in two, give one optimizer two parameter groups, or leave zero out of the spec"
                )
            number = found[0] if found else 0
            for name, parameter in part.named_parameters():
                where, first = first_uses.setdefault(parameter, (number, f"{child}.{name}"))
                if where != number:
                    raise SpecError(
                        f"{first!r} and '{child}.{name}' are one parameter, of submodules that optimizers {where} and {number} "
                        "train: under zero an optimizer trains whole submodules. Untie them, or leave zero out of the spec"
                    )
            chosen = shares[number]
            if chosen is not None:
                chosen.append(child)
        return shares

    def _take_over(self, before: Sequence[OptimizerUnit]) -> ParameterInit:
        """Replace parameters in chunks by meta ones; return a function that restores their values from the chunks."""
        known = {uncompiled_name(name): (unit, p) for unit in before for name, p in unit.parameters.items()}
        fresh: dict[nn.Parameter, nn.Parameter] = {}
        for module in self._module.modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if parameter not in fresh:
                    unit = next(unit for unit, p in known.values() if p is parameter)
                    dtype = _states(unit).gemini.master_dtype(parameter)
                    empty = torch.empty(self._shape(parameter), dtype=dtype, device="meta")
                    fresh[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                    fresh[parameter].__dict__.update(parameter.__dict__)
                module._parameters[name] = fresh[parameter]

        def values(name: str, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
            unit, old = known[uncompiled_name(name)]
            return _states(unit).gemini.read(old).to(self._world.device, dtype)

        return values

    def _shape(self, parameter: Tensor) -> tuple[int, ...]:
        """Return the shape of this rank's shard over the tensor axes, also of a released parameter."""
        return metadata_on(parameter, self._world.mesh).placement.local_shape(self._world.mesh)


def _states(unit: OptimizerUnit) -> ZeroStates:
    assert isinstance(unit.states, ZeroStates)  # every earlier unit was made here
    return unit.states


def _factory(around: PartialModule, optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[str]]) -> Factory:
    """Return a function that gives the user's own optimizer the parameters that chunks hold."""
    names = [name for name, p in around.named_parameters() if p.requires_grad]

    def make(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        by_name = dict(zip(names, parameters, strict=True))
        members = [[by_name[name] for name in group if name in by_name] for group in groups]
        retarget(optimizer, members, {})
        return optimizer

    return make
