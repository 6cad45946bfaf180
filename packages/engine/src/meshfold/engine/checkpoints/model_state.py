"""The whole model's state, however it is sharded: names, shapes and values of a single process's model.

Also the state of its optimizer, by the names of the whole model's parameters.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from meshfold.checkpoint import CheckpointError
from meshfold.checkpoint.state import (
    describe_extra_state,
    extra_state_value,
    load_extra_state,
    modules_with_extra_state,
    restore_extra_state,
)
from meshfold.engine.states.protocols import Source, Sources, States
from meshfold.engine.world import World, fail_together
from meshfold.mesh import broadcast
from meshfold.mesh.collectives import all_gather_object
from meshfold.mesh.parameters import uncompiled_name


class ModelState:
    """Reader and writer of a sharded model's master weights, tensor by tensor."""

    def __init__(self, model: nn.Module, states: States, world: World) -> None:
        self._model, self._states, self._world = model, states, world

    def tensors(self) -> dict[str, Tensor]:
        """Return the model's own tensors by their names in the state dict, without extra state; tied names share one tensor."""
        found = with_plain_names(self._model.state_dict(keep_vars=True))
        extra = self.modules_with_extra()
        return {name: value for name, value in found.items() if isinstance(value, Tensor) and name not in extra}

    def modules_with_extra(self) -> dict[str, nn.Module]:
        """Return this rank's modules with extra state, by its names in the whole state dict."""
        return modules_with_extra_state(self._model)

    def extra_names(self) -> Collection[str]:
        """Return every name of extra state in the whole model."""
        return self.modules_with_extra()

    def names(self) -> Iterable[str]:
        """Return every name of the whole state dict, in its order."""
        return self.tensors()

    def sources(self) -> dict[str, Source]:
        """Return each tensor of the whole model once, under its first name."""
        return {name: self._states.source(tensor) for name, tensor in self.unique().items()}

    def noted_sources_and_ties(self) -> tuple[Sources, dict[str, str]]:
        """Return :meth:`sources` with their present values, for a background save, and :meth:`ties`. All ranks must call."""
        first, ties = _names_and_ties(self.tensors())
        return self._states.noted_sources(first), ties

    def unique(self) -> dict[str, Tensor]:
        """Return each tensor that this rank holds a part of, once, under its first name."""
        return {name: tensor for tensor, name in _names_and_ties(self.tensors())[0].items()}

    def ties(self) -> dict[str, str]:
        """Return the other names of tensors, each with the first one."""
        return _names_and_ties(self.tensors())[1]

    def full(self, *, keep: bool = True) -> dict[str, Tensor]:
        """Return the whole state dict in CPU memory; all ranks must call. ``keep``: False leaves this rank's empty.

        Raises:
            CheckpointError: if a rank cannot read its part.
        """
        what = "cannot read the model's state"
        whole = read_whole(self.sources(), self._world, what, keep=keep)
        ties, extra = self.ties(), self.extra(what)
        if not keep:
            return {}
        found: dict[str, Any] = {name: whole[ties.get(name, name)] for name in self.names()}
        return {**found, **{name: extra_state_value(entry) for name, entry in extra.items()}}

    def extra(self, what: str) -> dict[str, dict[str, Any]]:
        """Return the extra state of the whole model: each module's from the first rank that has it. All ranks must call.

        Args:
            what: the operation, for the error message.

        Returns:
            Name to the result of :func:`meshfold.checkpoint.state.describe_extra_state`.

        Raises:
            CheckpointError: on all ranks, for a value that a checkpoint cannot hold.
        """
        if not self.extra_names():
            return {}
        mine: dict[str, dict[str, Any]] = {}
        error = None
        try:
            mine = describe_extra_state(self.modules_with_extra())
        except CheckpointError as refused:
            error = refused
        fail_together(self._world, error, what)
        return self._merged_extra(mine)

    def _merged_extra(self, mine: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = all_gather_object(mine, self._world.everyone, self._world.device)[0]
        return found

    def load_extra(self, given: Mapping[str, Any], what: str) -> None:
        """Set the extra state of modules; all ranks must call. State that is missing is not changed, with a warning.

        Raises:
            CheckpointError: on all ranks, if a module does not accept it; then nothing changes.
        """
        names = self.extra_names()
        if not names:
            return
        modules = self.modules_with_extra()
        before, error = load_extra_state(modules, given)
        try:
            fail_together(self._world, error, what)
        except CheckpointError:
            restore_extra_state(modules, before)
            raise
        missing = [name for name in names if name not in given]
        if missing and self._world.mesh.rank == 0:
            warnings.warn(f"{what}: it has no {_some(missing)}; the model keeps its own", stacklevel=4)

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a whole state dict, of a compiled model or not; a tied tensor may have any of its names.

        Raises:
            CheckpointError: for names that are missing or unknown, or a shape that is not the model's.
        """
        given = self.check(state)
        self.load_extra(self.extra_in(state), "load_state_dict()")
        self.write(given)

    def write(self, given: Mapping[str, Tensor]) -> None:
        """Load the tensors that :meth:`check` returned."""
        for name, tensor in self.unique().items():
            self._states.write(tensor, given[name])
        self._states.publish()

    def check(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Check that :meth:`load` would accept a state dict; change nothing.

        Returns:
            The state dict, with each tied tensor under its first name.

        Raises:
            CheckpointError: for names that are missing or unknown, or a shape that is not the model's.
        """
        names, sources, ties = set(self.names()), self.sources(), self.ties()
        state = with_plain_names(state)
        extra = self.extra_names()
        state = {name: value for name, value in state.items() if name not in extra}
        unknown = [name for name in state if name not in names]
        if unknown:
            raise CheckpointError(f"the model has no {_some(unknown)}: the state belongs to another model")
        given = {ties.get(name, name): value for name, value in state.items()}
        missing = [name for name in sources if name not in given]
        if missing:
            raise CheckpointError(
                f"the state has no {_some(missing)}, which the model needs: it belongs to another model"
            )
        for name, source in sources.items():
            _check_shape(name, given[name], source.shape)
        return given

    def extra_in(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the extra state in a whole state dict."""
        extra = self.extra_names()
        return {name: value for name, value in with_plain_names(state).items() if name in extra} if extra else {}

    # -- the optimizer's ----------------------------------------------------------------------------------------

    def optimizer_sources(self) -> dict[str, Source]:
        """Return the optimizer's tensors by ``parameter/state``. All ranks must call."""
        return self._states.optimizer_sources()

    def noted_optimizer_sources(self) -> Sources:
        """Return :meth:`optimizer_sources` with their present values, for a background save. All ranks must call."""
        return self._states.noted_optimizer_sources()

    def optimizer_description(self) -> dict[str, Any]:
        """Return the optimizer's settings, which a checkpoint stores with its tensors. All ranks must call."""
        return self._states.optimizer_description()

    def check_optimizer(self, description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Raise a CheckpointError for what :meth:`load_optimizer` would refuse; nothing is changed."""
        self._states.check_optimizer(description, (*tensors, *description["values"]))

    def load_optimizer(self, description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Load the optimizer's state from a checkpoint."""
        self._states.load_optimizer(description, tensors)


def read_whole(sources: Mapping[str, Source], world: World, what: str, *, keep: bool = True) -> dict[str, Tensor]:
    """Return whole tensors in CPU memory, read one by one; all ranks must call. ``keep``: False returns none on this rank.

    Raises:
        CheckpointError: on all ranks, beginning with ``what``, if one cannot read its part.
    """
    found: dict[str, Tensor] = {}
    error: Exception | None = None
    for name, source in sources.items():
        try:
            value = source.read()
        except Exception as unread:  # the other ranks need this one in what follows
            error = error or unread
            value = torch.zeros(source.shape, dtype=source.dtype, device=world.device)
        if not source.alike:
            value = broadcast(value, world.everyone, 0)
        if keep:
            found[name] = value.to("cpu", copy=True)
    fail_together(world, error, what)
    return found


def _names_and_ties(tensors: Mapping[str, Tensor]) -> tuple[dict[Tensor, str], dict[str, str]]:
    """Return each tensor's first name, and its other names with the first one."""
    first: dict[Tensor, str] = {}
    ties: dict[str, str] = {}
    for name, tensor in tensors.items():
        known = first.setdefault(tensor, name)
        if known != name:
            ties[name] = known
    return first, ties


def _check_shape(name: str, whole: Tensor, wanted: tuple[int, ...]) -> None:
    if tuple(whole.shape) != wanted:
        raise CheckpointError(f"{name!r} has shape {tuple(whole.shape)} in the state, but {wanted} in the model")


def _some(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:3]))
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


T = TypeVar("T")


def with_plain_names(found: Mapping[str, T]) -> dict[str, T]:
    """Return the same under plain names; the first of duplicates."""
    named: dict[str, T] = {}
    for name, value in found.items():
        named.setdefault(uncompiled_name(name), value)
    return named


def describe_model(model: Any) -> dict[str, Any] | None:
    """Return the configuration of a model; None for a model whose configuration cannot be written.

    A configuration can define ``checkpoint_description()``; configurations of transformers are written as JSON.
    """
    config: Any = getattr(model, "config", None)
    if hasattr(config, "checkpoint_description"):
        own: dict[str, Any] = config.checkpoint_description()
        return own
    if hasattr(config, "to_json_string"):
        found = json.loads(config.to_json_string(use_diff=True))
        found["architectures"] = found.get("architectures") or [type(model).__name__]
        return {"kind": "hf", "config": found}
    return None
