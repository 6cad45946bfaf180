"""The units of a module without ``zero``: weights, gradients and optimizer state are whole on every data rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.engine.precision import Masters, Precision, cast_rest, other_dtypes
from meshfold.engine.states import PlainStates
from meshfold.engine.world import World
from meshfold.lightning.optimizer_units import OptimizerUnit, OptimizerUnits, retarget


class ReplicatedUnits:
    """Makes units of the parameters as they are; the methods are those of ``ZeroUnits``.

    Attributes:
        in_chunks: False; units can be made anew at any time.
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
        """Give parameters their master weights back and optimizers the parameters; return no units."""
        by_name = dict(self._module.named_parameters())
        for unit in units:
            unit.close()
            if not isinstance(unit.states, PlainStates):
                continue
            masters = unit.states.masters
            back: dict[Tensor, Tensor] = {masters.of(p): p for p in unit.parameters.values()}
            for master, parameter in back.items():
                parameter.data = master.detach()
            if unit.optimizer is not None:
                added = [group["params"] for group in unit.optimizer.param_groups[len(unit.given) :]]
                groups = [[by_name[name] for name in names] for names in unit.given]
                retarget(unit.optimizer, [*groups, *added], back)
        return OptimizerUnits([], self._world)

    def stand_ins(self) -> AbstractContextManager[None]:
        """Optimizers are made of the parameters themselves."""
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
            optimizers: of the parameters; they are stepped with on the master weights from then on.
            given: names of the parameters in their groups.
            before: none: they were let go.
            accumulation: makes no difference here.
        """
        made = [self._unit(*pair) for pair in zip(optimizers, given, strict=True)]
        made = made or [self._unit(None, [])]
        cast_rest(self._module, self._precision, {p for unit in made for p in unit.parameters.values()})
        return made

    def _unit(self, optimizer: torch.optim.Optimizer | None, given: list[list[str]]) -> OptimizerUnit:
        """Return the unit of an optimizer's parameters; without an optimizer, of all that could be trained."""
        by_name = dict(self._module.named_parameters())
        chosen = [by_name[name] for names in given for name in names] if optimizer else [*by_name.values()]
        mine = {name: p for name, p in by_name.items() if p.requires_grad and any(p is c for c in chosen)}
        masters = Masters(mine.values(), self._precision, other_dtypes(self._module, self._precision))

        def made(targets: Any) -> torch.optim.Optimizer:
            assert optimizer is not None  # else nothing is to be made
            groups = [[masters.of(mine[name]) for name in names if name in mine] for names in given]
            retarget(optimizer, groups, {p: masters.of(p) for p in mine.values()})
            return optimizer

        states = PlainStates(mine, masters, self._world, made if optimizer else None)
        return OptimizerUnit(optimizer, states, mine, given, None, chosen if optimizer else ())
