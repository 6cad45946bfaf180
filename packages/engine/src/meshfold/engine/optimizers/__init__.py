"""Optimizers by name or class, and the guard of their steps.

If an optimizer is elementwise, a rank steps only its own shards. An optimizer that needs norms of whole tensors gets them. One
that needs whole parameters gets these through ``zero``.

``dict(name="adamw", lr=3e-4, weight_decay=0.1, no_decay="norms_and_biases")``, or a class or function that takes a
list of parameters and returns a ``torch.optim.Optimizer``. Weight decay applies to all parameters, as in torch, unless
``no_decay`` says otherwise.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from meshfold.engine.errors import TrainingError
from meshfold.engine.optimizers.own_scaler import OwnScaler
from meshfold.engine.optimizers.roles import groups_by_role, note_roles, pass_roles_on
from meshfold.engine.optimizers.trial import Trial
from meshfold.mesh import SpecError, did_you_mean
from meshfold.mesh.parameters import OptimizerProbeError, ShardedBlocks, ShardedSquareSums, probe_optimizer
from meshfold.mesh.spec import argument_checks as settings
from meshfold.optimizers import (
    Adafactor,
    AdafactorHF,
    Came,
    GaLoreAdafactor,
    GaLoreAdamW,
    Lamb,
    Lars,
    Lion,
    Muon,
    averaged,
)

__all__ = [
    "OPTIMIZERS",
    "OWN_SCALER",
    "Factory",
    "StepGuard",
    "Trial",
    "check_optimizer_class",
    "note_roles",
    "optimizer_factory",
    "pass_roles_on",
]

Scheduler: TypeAlias = torch.optim.lr_scheduler.LRScheduler
Factory: TypeAlias = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "lion": Lion,
    "lamb": Lamb,
    "lars": Lars,
    "adafactor": Adafactor,
    "adafactor_hf": AdafactorHF,
    "came": Came,
    "muon": Muon,
    "galore_adamw": GaLoreAdamW,
    "galore_adafactor": GaLoreAdafactor,
}
# The setting that steps many parameters in one kernel or a few.
_IN_ONE_KERNEL: dict[type[torch.optim.Optimizer], dict[str, bool]] = {
    torch.optim.AdamW: {"fused": True},
    torch.optim.Adam: {"fused": True},
    # Its fused step fails for a parameter whose first gradient comes after the first step.
    torch.optim.SGD: {"foreach": True},
}
NO_DECAY = "norms_and_biases"
_AVERAGE = ("average", "average_ramp")

# These read whole matrices, and would compute something else on shards.
_WHOLE = {"Adafactor", "Muon"}
_NEVER = {
    "LBFGS": "needs all gradients as one vector, and evaluates the loss several times a step",
    "SparseAdam": "is for sparse gradients, and gradients are summed over ranks as dense ones",
}
_ELSEWHERE = {"learning_rate": "lr", "epsilon": "eps", "wd": "weight_decay", "decay": "weight_decay"}
"""other libraries' names of settings"""
_SCHEDULER = "a function of the optimizer: lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1000)"
_OURS = {"params", "self", "foreach", "fused", "capturable", "differentiable"}


def optimizer_factory(value: object, *, whole: bool = False) -> Factory | None:
    """Return a function that makes the optimizer from the list of parameters; None for None (evaluation only).

    ``whole``: optimizers that need whole matrices will have them: through ``zero``, or without tensor parallelism.

    Settings are tried on a parameter of one element, so that mistakes show before anything starts.

    Raises:
        SpecError: for an unknown name or key, settings that the optimizer refuses, an optimizer that already exists
            or is not elementwise.
    """
    if value is None:
        return None
    if isinstance(value, torch.optim.Optimizer):
        raise SpecError(
            f"optimizer={type(value).__name__}(...) holds parameters that the engine replaces by shards: "
            f"pass its class and settings, dict(name=torch.optim.{type(value).__name__}, lr=...)"
        )
    if isinstance(value, str):
        value = {"name": value}
    if isinstance(value, Mapping):
        factory = _from_dict(value, whole)
    elif callable(value):
        factory = value
    else:
        raise SpecError(f"optimizer={value!r}: write dict(name='adamw', lr=3e-4), or a class or function of parameters")
    _check(factory, value, whole)
    return factory


def of_any_stage(factory: Factory) -> Factory:
    """Return the same function, refused if it assigns parameters to groups by list position, since each stage has its own list.

    A function that handles stages has an attribute ``knows_stages``.

    Raises:
        SpecError: when it is called, if parameters in another order get other settings.
    """
    if getattr(factory, "knows_stages", False):
        return factory

    def make(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        # Try two other orders: reversed, and rotated by one.
        others = [_settings_of(factory([*some])) for some in (reversed(parameters), [*parameters[1:], parameters[0]])]
        made = factory(parameters)
        if any(_settings_of(made) != other for other in others):
            raise SpecError(
                "pipeline: the optimizer assigns parameters to groups by their position in the list, but every stage has its own "
                "list: choose groups by a property of the parameters, such as p.dim(), or leave pipeline out"
            )
        return made

    return make


def _settings_of(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    return {
        id(p): {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
        for p in group["params"]
    }


def check_sight(optimizer: torch.optim.Optimizer, *, split: Sequence[str], stages: bool) -> None:
    """Check that an optimizer steps as in one process although this rank does not have everything.

    torch's own are known by name. Others may declare ``elementwise = True`` or ``False``, or are tried.

    Args:
        optimizer: of this rank's blocks.
        split: names of split parameters.
        stages: other ranks have other parameters.

    Raises:
        SpecError: for one that needs other ranks' values.
    """
    if not (split or stages) or type(optimizer).__module__.startswith("torch.optim"):
        return
    name, declared = type(optimizer).__name__, getattr(optimizer, "elementwise", None)
    if declared is True or isinstance(getattr(optimizer, "square_sums", None), ShardedSquareSums):
        return
    if isinstance(getattr(optimizer, "blocks", None), ShardedBlocks):
        return
    try:
        seen = {"matrices"} if declared is False else {probe_optimizer(optimizer, g) for g in optimizer.param_groups}
    except OptimizerProbeError as error:
        raise SpecError(f"optimizer: {error}") from error
    if "others" in seen:
        raise SpecError(
            f"optimizer: {name}'s step on a parameter depends on other parameters (or on chance), but no rank has them all: if "
            "this is only clipping by a global norm, use clip_grad_norm; if it draws random numbers for each element, set "
            "elementwise = True on its class"
        )
    if split and "matrices" in seen:
        raise SpecError(
            f"optimizer: {name} needs whole parameters, but a rank has only a part of {split[0]!r}, on which its step would "
            "differ. Use an elementwise optimizer such as adamw, or leave tensor parallelism out"
        )


def scheduler_of(factory: object, optimizer: torch.optim.Optimizer | None) -> Scheduler | None:
    """Return the learning-rate scheduler that a function makes of the optimizer.

    Raises:
        SpecError: if it is not a function, returns something else, or a scheduler that needs a metric.
    """
    if factory is None or optimizer is None:
        return None
    if not callable(factory):
        raise SpecError(f"lr_scheduler={factory!r}: give {_SCHEDULER}")
    try:
        made = factory(optimizer)
    except (TypeError, ValueError) as error:
        raise SpecError(f"lr_scheduler, called with the optimizer: {error}. Give {_SCHEDULER}") from error
    if not isinstance(made, Scheduler):
        raise SpecError(
            f"lr_scheduler made {made!r} of the optimizer, which is not a torch.optim.lr_scheduler.LRScheduler"
        )
    if isinstance(made, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise SpecError(
            "lr_scheduler made ReduceLROnPlateau, which must be stepped with a validation loss, but the engine steps its scheduler "
            "after every step: make it from engine.optimizer in your loop, and call its step(engine.eval_step(batch))"
        )
    if made.optimizer is not optimizer:
        raise SpecError(f"lr_scheduler made a {type(made).__name__} of another optimizer. Give {_SCHEDULER}")
    return made


def _from_dict(value: Mapping[str, Any], whole: bool) -> Factory:
    rest = dict(value)
    if isinstance(rest.get("name"), type) and issubclass(rest["name"], torch.optim.Optimizer):
        cls = rest.pop("name")
    else:
        name, rest = settings.named("optimizer", rest, OPTIMIZERS)
        cls = OPTIMIZERS[name]
    check_optimizer_class(cls, value, whole)
    average = {name: rest.pop(name) for name in _AVERAGE if name in rest}
    made_of: Any = _averaged(cls, value) if average else cls
    no_decay = rest.pop("no_decay", None)
    if no_decay not in (None, NO_DECAY):
        raise SpecError(
            f"optimizer={value!r}: write no_decay={NO_DECAY!r}, or leave it out.{did_you_mean(str(no_decay), [NO_DECAY])}"
        )
    defaults = {name: p.default for name, p in inspect.signature(cls).parameters.items() if name not in _OURS}
    for key in rest.keys() & _ELSEWHERE.keys():
        if _ELSEWHERE[key] in defaults:
            raise SpecError(
                f"optimizer={value!r}: {key!r} is called {_ELSEWHERE[key]!r} here: write {_ELSEWHERE[key]}={rest[key]!r}"
            )
    settings.known_keys("optimizer", value, rest, {**defaults, "no_decay": None, **dict.fromkeys(_AVERAGE)})
    for key, setting in rest.items():
        _check_setting(value, key, setting, defaults[key])

    def make(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [{"params": list(parameters)}]
        by_role = getattr(cls, "needs_roles", False)
        if by_role:
            groups = groups_by_role(parameters)
        elif no_decay:
            groups = [
                {"params": [p for p in parameters if p.dim() > 1]},
                {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
            ]
        # Keep empty groups: all stages of a pipeline must have the same ones.
        made: torch.optim.Optimizer = made_of(groups, **rest, **average, **_IN_ONE_KERNEL.get(cls, {}))
        if by_role and no_decay:
            made.param_groups[-1]["weight_decay"] = 0.0
        return made

    return make


def _averaged(cls: type[torch.optim.Optimizer], value: object) -> type[torch.optim.Optimizer]:
    """Return the class of an optimizer that also averages the weights, whose shards it must be able to step."""
    name = cls.__name__
    if (cls.__module__.startswith("torch.optim") and name not in _WHOLE) or getattr(cls, "elementwise", False):
        return averaged(cls)
    raise SpecError(
        f"optimizer={value!r}: averages of weights are kept by optimizers that step on each element by itself, and {name} "
        "does not: use adamw, or leave average out"
    )


def _check_setting(value: object, key: str, setting: object, default: object) -> None:
    """Check that a setting has the type of its default; torch fails later in a comparison that does not name it."""
    if isinstance(default, tuple):
        if not isinstance(setting, tuple | list) or len(setting) != len(default):
            raise SpecError(
                f"optimizer={value!r}: {key}={setting!r}: give {len(default)} values, as in {key}={default!r}"
            )
    elif _is_number(default) and not _is_number(setting):
        raise SpecError(
            f"optimizer={value!r}: {key}={setting!r} is not a number; leave it out for the default, {default!r}"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | Tensor) and not isinstance(value, bool)


def check_optimizer_class(cls: object, value: object, whole: bool) -> None:
    """Raise a SpecError for a class that cannot step shards; ``whole``: it will have whole matrices."""
    name = getattr(cls, "__name__", "")
    known = f"Known: {', '.join(OPTIMIZERS)}, or another elementwise class of torch.optim"
    if name in _NEVER:
        raise SpecError(f"optimizer={value!r}: {name} {_NEVER[name]}. {known}")
    if whole or hasattr(cls, "blocks"):
        return
    if name in _WHOLE or getattr(cls, "sight", None) == "matrices":
        named = f"write optimizer=dict(name={name.lower()!r}), which does; or " if name.lower() in OPTIMIZERS else ""
        raise SpecError(
            f"optimizer={value!r}: {name} is not elementwise, so it cannot step on shards of tensor "
            f"parallelism: {named}leave the entry tensor out; with zero=dict(stage=1) each matrix is stepped "
            f"whole by one rank. {known}"
        )


def _check(factory: Factory, value: object, whole: bool) -> None:
    check_optimizer_class(factory, value, whole)
    tried = [nn.Parameter(torch.zeros(1, 1)), nn.Parameter(torch.zeros(1))]
    try:
        made = factory(tried)
    except (TypeError, ValueError) as error:
        raise SpecError(f"optimizer={value!r}: {error}") from error
    if not isinstance(made, torch.optim.Optimizer):
        raise SpecError(f"optimizer={value!r} made {made!r} of the parameters, which is not a torch.optim.Optimizer")
    check_optimizer_class(type(made), value, whole)
    stepped = {id(parameter) for group in made.param_groups for parameter in group["params"]}
    if not stepped <= {id(parameter) for parameter in tried}:
        raise SpecError(
            f"optimizer={value!r} makes a {type(made).__name__} of other parameters than it is given, which are this "
            f"rank's shards: write lambda parameters: {type(made).__name__}(parameters, lr=...)"
        )


_SCALES = "_step_supports_amp_scaling"
"""Attribute of an optimizer that torch's GradScaler reads."""
OWN_SCALER = (
    "Leave the GradScaler out: with Engine(..., precision='fp16') the engine scales the loss, unscales gradients and skips steps "
    "that overflow; bf16 and float32 need no scale"
)
"""Advice on a GradScaler of a user's own."""


class StepGuard:
    """Guard that refuses an optimizer's ``step()`` except from its owner, until it is closed.

    Gradients wait where they are summed over the ranks, and the optimizer gets them right before it steps. Called by hand,
    ``optimizer.step()`` would find none and silently do nothing. torch's ``GradScaler`` looks for gradients before it calls
    ``step()``, except of an optimizer that says to scale by itself; with ``scaler`` a guarded one says so, to be called.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, advice: str, *, scaler: str = "") -> None:
        """Args:
        optimizer: None for evaluation only, where nothing is guarded.
        advice: the mistake and the call to make instead, appended to the name of the method.
        scaler: what to do instead, appended if a GradScaler called it.
        """
        self._advice, self._open = advice, False
        self._handle = None if optimizer is None else optimizer.register_step_pre_hook(self._before)
        self._own_scaler = OwnScaler(scaler)
        self._scaler, self._own = scaler, {} if optimizer is None else vars(optimizer)
        self._scales = self._own.get(_SCALES)
        if scaler:
            self._own[_SCALES] = True

    def saw(self, loss: Tensor) -> None:
        """Look whether a GradScaler has scaled the loss of a backward."""
        self._own_scaler.saw(loss)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Context manager: inside, the owner steps; it is warned of gradients that a GradScaler has scaled and not unscaled."""
        self._own_scaler.check()
        self._open = True
        try:
            yield
        finally:
            self._open = False

    def close(self) -> None:
        """Release the optimizer; may be called twice."""
        if self._handle is not None:
            self._handle.remove()
        if self._scaler:
            self._own.pop(_SCALES, None)
            self._own.update({} if self._scales is None else {_SCALES: self._scales})

    def _before(self, optimizer: torch.optim.Optimizer, *called: Any) -> None:
        """Raises:
        TrainingError: for a step outside the owner's.
        """
        if not self._open:
            own = vars(optimizer)
            scaler = f". {self._scaler}" if self._scaler and "found_inf" in own else ""
            for left in ("grad_scale", "found_inf"):  # a GradScaler sets them; a step that goes on would read them
                own.pop(left, None)
            raise TrainingError(f"{type(optimizer).__name__}.step() {self._advice}{scaler}")
