"""The lanes of a module without ``zero``: weights, gradients and optimizer state are whole on every data rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.engine.precision import Masters, Precision, cast_rest, other_dtypes
from meshfold.engine.states import PlainStates
from meshfold.engine.world import World
from meshfold.lightning.lanes import Lane, Lanes, repoint


class PlainLanes:
    """Makes lanes of the parameters as they are; the methods are those of ``ZeroLanes``.

    Attributes:
        in_chunks: False; lanes can be made anew at any time.
    """

    in_chunks = False

    def __init__(self, module: nn.Module, world: World, precision: Precision) -> None:
        """Args:
        module: assembled.
        world: where it lies.
        precision: of the module.
        """
        self._module, self._world, self._precision = module, world, precision

    def let_go(self, lanes: Lanes) -> Lanes:
        """Let parameters be the true weights again, and optimizers be of parameters; there are no lanes then."""
        by_name = dict(self._module.named_parameters())
        for lane in lanes:
            lane.close()
            if not isinstance(lane.states, PlainStates):
                continue
            masters = lane.states.masters
            back: dict[Tensor, Tensor] = {masters.of(p): p for p in lane.parameters.values()}
            for true, parameter in back.items():
                parameter.data = true.detach()
            if lane.optimizer is not None:
                added = [group["params"] for group in lane.optimizer.param_groups[len(lane.given) :]]
                groups = [[by_name[name] for name in names] for names in lane.given]
                repoint(lane.optimizer, [*groups, *added], back)
        return Lanes([], self._world)

    def stand_ins(self) -> AbstractContextManager[None]:
        """Optimizers are made of the parameters themselves."""
        return nullcontext()

    def make(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        given: Sequence[list[list[str]]],
        *,
        before: Sequence[Lane],
        accumulation: int,
    ) -> list[Lane]:
        """Lanes for optimizers; without any, one to evaluate with.

        Args:
            optimizers: of the parameters; they are stepped with on the true weights from then on.
            given: names of the parameters in their groups.
            before: none: they were let go.
            accumulation: makes no difference here.
        """
        made = [self._lane(*pair) for pair in zip(optimizers, given, strict=True)]
        made = made or [self._lane(None, [])]
        cast_rest(self._module, self._precision, {p for lane in made for p in lane.parameters.values()})
        return made

    def _lane(self, optimizer: torch.optim.Optimizer | None, given: list[list[str]]) -> Lane:
        """Return the lane of an optimizer's parameters; without an optimizer, of all that could be trained."""
        by_name = dict(self._module.named_parameters())
        chosen = [by_name[name] for names in given for name in names] if optimizer else [*by_name.values()]
        mine = {name: p for name, p in by_name.items() if p.requires_grad and any(p is c for c in chosen)}
        masters = Masters(mine.values(), self._precision, other_dtypes(self._module, self._precision))

        def made(targets: Any) -> torch.optim.Optimizer:
            assert optimizer is not None  # else nothing is to be made
            groups = [[masters.of(mine[name]) for name in names if name in mine] for names in given]
            repoint(optimizer, groups, {p: masters.of(p) for p in mine.values()})
            return optimizer

        states = PlainStates(mine, masters, self._world, made if optimizer else None)
        return Lane(optimizer, states, mine, given, None, chosen if optimizer else ())
