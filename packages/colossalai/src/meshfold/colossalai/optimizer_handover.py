"""Handover of a script's optimizer to the engine.

The script made it from the whole model's parameters. The engine replaces these by shards, so it makes an optimizer of the same
class and settings from the shards. Groups are matched by the parameters' names. The script's object then shows the groups of
the new one, so that a scheduler of the script still sets the rates. Methods that would have no effect raise an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from meshfold.engine import Engine
from meshfold.engine.optimizers import Factory
from meshfold.mesh import SpecError
from meshfold.mesh.parameters import uncompiled_name

_NOT_SETTINGS = ("params", "param_names")


def take_over(optimizer: object, model: nn.Module) -> object:
    """Return a function that makes the optimizer again, of the engine's parameters.

    Anything but an optimizer object is returned unchanged: the engine's own forms. Parameters of the model that are not in
    the optimizer are frozen, since it would not train them.

    Args:
        optimizer: of the model's parameters.
        model: whole; the engine's.

    Raises:
        SpecError: for one that has stepped, has parameters of another model, or cannot be made again.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    name = type(optimizer).__name__
    if any(_has_moved(state) for state in optimizer.state.values()):
        raise SpecError(
            f"optimizer={name}(...) has stepped already, and its state belongs to whole parameters: give a new one, and load "
            "a checkpoint into the engine"
        )
    group_of = _groups(optimizer, model)
    _freeze(model, group_of)
    _check(optimizer)
    return _factory(optimizer, model, group_of)


def _groups(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, int]:
    """Return each parameter's group number, under all of its names."""
    names: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(uncompiled_name(name))
    group_of: dict[str, int] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in names:
                raise SpecError(
                    f"optimizer={type(optimizer).__name__}(...) has a parameter of shape {tuple(parameter.shape)} that is not the "
                    "model's: make the optimizer of model.parameters(), after the last change to the model"
                )
            group_of.update(dict.fromkeys(names[parameter], number))
    return group_of


def _freeze(model: nn.Module, group_of: dict[str, int]) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and uncompiled_name(name) not in group_of:
            parameter.requires_grad_(False)


def _factory(optimizer: torch.optim.Optimizer, model: nn.Module, group_of: dict[str, int]) -> Factory:
    cls, defaults = _class_of(optimizer), _arguments(optimizer)
    settings = [
        {key: value for key, value in group.items() if key not in _NOT_SETTINGS} for group in optimizer.param_groups
    ]

    def make(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        # The engine has sharded the model in place and asks for an optimizer of the resulting parameters, in their order.
        names = [uncompiled_name(name) for name, p in model.named_parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [{"params": [], **own} for own in settings]
        if len(names) != len(parameters):  # the engine first tries the function on two small parameters
            names = [next(iter(group_of))] * len(parameters)
        for name, parameter in zip(names, parameters, strict=True):
            groups[group_of[name]]["params"].append(parameter)
        made: torch.optim.Optimizer = cls(groups, **defaults)
        return made

    make.knows_stages = True  # type: ignore[attr-defined]
    return make


def _class_of(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """Return the class that the engine uses: the optimizer's own, or the one it stands for."""
    found: type[torch.optim.Optimizer] = getattr(optimizer, "stands_for", type(optimizer))
    return found


def _arguments(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the arguments of an optimizer's constructor, as far as known."""
    takes = inspect.signature(_class_of(optimizer)).parameters
    # With a relative rate Adafactor takes no lr: its groups show the rate of the last step.
    shown = {"lr"} if optimizer.defaults.get("relative_step") else set()
    return {name: value for name, value in optimizer.defaults.items() if name in takes and name not in shown}


def _check(optimizer: torch.optim.Optimizer) -> None:
    """Check that the optimizer can be rebuilt from its class."""
    name = type(optimizer).__name__
    advice = f"give a function that makes it, optimizer=lambda parameters: {name}(parameters, ...)"
    try:
        again = _class_of(optimizer)([nn.Parameter(torch.zeros(1))], **_arguments(optimizer))
    except Exception as error:
        raise SpecError(
            f"optimizer={name}(...) cannot be made again from its defaults ({type(error).__name__}: {error}): {advice}"
        ) from error
    if again.defaults != optimizer.defaults:
        differ = [key for key, value in optimizer.defaults.items() if again.defaults.get(key) != value]
        raise SpecError(f"optimizer={name}(...): its settings {differ} are not arguments of its class: {advice}")


def _has_moved(state: object) -> bool:
    """Return True if an optimizer has stepped; some have state before their first step."""
    return isinstance(state, dict) and bool(state) and float(state.get("step", 1)) > 0


def follow(old: object, engine: Engine, instead: str) -> None:
    """Make the script's optimizer show the groups of the engine's, and refuse to step.

    Args:
        old: the script's optimizer; anything else is ignored.
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
    step._wrapped_by_lr_sched = True  # torch's schedulers warn without it
    members = {
        "param_groups": property(lambda self: new.param_groups),
        "zero_grad": lambda self, set_to_none=True: engine.zero_grad(),
        "step": step,
        "state_dict": refuse("state_dict", "engine.save(folder) writes its state"),
        "load_state_dict": refuse("load_state_dict", "engine.load(folder) reads its state"),
        "_opt_called": True,
        "__module__": type(old).__module__,
    }
    vars(old).pop("step", None)  # a scheduler has put a wrapper there
    # Scripts keep references to it, in a scheduler for example, so it must stay the same object.
    old.__class__ = type(name, (type(old),), members)
