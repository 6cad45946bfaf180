"""The optimizer that a script made, after the engine has taken it over.

The engine steps an optimizer of its own, of this rank's parameters. What a script still does to the one it made goes there:
a schedule that was not handed over with it, and so still writes its rates into the groups of the first, sets those of the
second. What would have no effect any more is refused.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from meshfold.engine import Engine
from meshfold.mesh import SpecError


def follow(old: object, engine: Engine, instead: str) -> None:
    """Let the script's optimizer show the groups of the engine's, and refuse to step by itself.

    Args:
        old: the optimizer that the script made; anything else is left alone.
        engine: has taken it over.
        instead: what to call in place of its ``step``.
    """
    new = engine.optimizer
    if not isinstance(old, torch.optim.Optimizer) or new is None:
        return
    name = type(old).__name__

    def refuse(method: str, advice: str) -> Any:
        def refused(self: object, *args: object, **kwargs: object) -> NoReturn:
            raise SpecError(
                f"optimizer.{method}() of the {name} that was handed over would reach no parameter: {advice}"
            )

        return refused

    step = refuse("step", f"call {instead}")
    step._wrapped_by_lr_sched = True  # torch's schedules look for it, and warn where it is not
    members = {
        "param_groups": property(lambda self: new.param_groups),
        "zero_grad": lambda self, set_to_none=True: engine.zero_grad(),
        "step": step,
        "state_dict": refuse("state_dict", "engine.save(folder) writes its state"),
        "load_state_dict": refuse("load_state_dict", "engine.load(folder) reads its state"),
        "_opt_called": True,
        "__module__": type(old).__module__,
    }
    vars(old).pop("step", None)  # a schedule has put a wrapper there
    # A script may hold it in many places, as in a schedule: it stays the same object.
    old.__class__ = type(name, (type(old),), members)
