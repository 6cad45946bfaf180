"""Checkpoints of a LightningModule: a folder written by all ranks, or Lightning's own file.

The folder has the format of :mod:`meshfold.engine.checkpoints.checkpoint`. The optimizers' tensors are in
``optimizer.safetensors``, ``optimizer-1.safetensors``, ... Lightning's other state (loops, callbacks, schedulers, hyper-parameters)
is in ``lightning.pt``. The file is what a trainer on one device writes: whole tensors, optimizer states by number. Either can
be loaded under any spec and on any number of ranks. So can a file of any other strategy that writes whole tensors.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshfold.checkpoint import CheckpointError
from meshfold.checkpoint.files import write_atomically
from meshfold.checkpoint.folder import EXTRA_STATE_FILE, STATE_FILE, set_aside_path
from meshfold.checkpoint.state import split_extra_state
from meshfold.engine.checkpoints import (
    MODEL_FILE,
    Checkpoint,
    ModelState,
    read_whole,
    with_plain_names,
    write_checkpoint,
)
from meshfold.engine.states import plain_settings
from meshfold.lightning.optimizer_units import OptimizerUnit, OptimizerUnits
from meshfold.lightning.session import Session
from meshfold.mesh.parameters import uncompiled_name

REST = "lightning.pt"
_STATE, _OPTIMIZERS = "state_dict", "optimizer_states"


def optimizer_file(number: int) -> str:
    """Return the name of the file with an optimizer's tensors."""
    return "optimizer.safetensors" if number == 0 else f"optimizer-{number}.safetensors"


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Return True if a path is a checkpoint folder of this strategy."""
    place = Path(path)
    return any((folder / STATE_FILE).exists() for folder in (place, set_aside_path(place)))


def write_folder(path: str | os.PathLike[str], session: Session, checkpoint: Mapping[str, Any]) -> None:
    """Write Lightning's checkpoint as a folder. All ranks must call.

    Args:
        path: the folder.
        session: the module's.
        checkpoint: Lightning's dict; its tensors of module and optimizers are ignored.

    Raises:
        CheckpointError: on all ranks, if one could not write.
    """
    files = {MODEL_FILE: session.state.sources()}
    state: dict[str, Any] = {
        "kind": "lightning",
        "spec": str(session.world.spec.to_dict()),
        "precision": session.precision.name,
        "step": int(checkpoint.get("global_step", 0)),
        "micro_step": session.steps,
        "ties": session.state.ties(),
        "optimizers": [],
    }
    if _OPTIMIZERS in checkpoint:
        for number, unit in enumerate(_training(session.units)):
            files[optimizer_file(number)] = unit.states.optimizer_sources()
            state["optimizers"].append(unit.states.optimizer_description())
    rest = {key: value for key, value in checkpoint.items() if key not in (_STATE, _OPTIMIZERS)}
    state["extra_state"], more = split_extra_state(session.state.extra(f"cannot write the checkpoint {path}"))
    small = {REST: rest, **({EXTRA_STATE_FILE: more} if more else {})}
    write_checkpoint(path, session.world, files, state, small, all_read=session.units.all_read)


def whole_optimizer_state(session: Session, unit: OptimizerUnit) -> dict[str, Any]:
    """Return an optimizer's state in torch's form for one device, on rank 0; elsewhere without tensors. All ranks must call."""
    assert unit.optimizer is not None  # only units with an optimizer get here
    keep = session.world.mesh.rank == 0
    whole = read_whole(unit.states.optimizer_sources(), session.world, "cannot read the optimizer's state", keep=keep)
    values = unit.states.optimizer_description()["values"]
    numbers, groups = _numbered(unit)
    state: dict[int, dict[str, Any]] = {}
    for entry, value in {**values, **whole}.items():
        name, _, key = entry.rpartition("/")
        state.setdefault(numbers[name], {})[key] = value
    settings = [
        {**{key: value for key, value in group.items() if key != "params"}, "params": places}
        for group, places in zip(unit.optimizer.param_groups, groups, strict=True)
    ]
    return {"state": state, "param_groups": settings}


def _numbered(unit: OptimizerUnit) -> tuple[dict[str, int], list[list[int]]]:
    """Return torch's numbers of an optimizer's parameters, by name and by group, in the order of its construction."""
    numbers: dict[str, int] = {}
    groups = []
    for names in unit.given:
        groups.append([numbers.setdefault(uncompiled_name(name), len(numbers)) for name in names])
    return numbers, groups


def _training(units: OptimizerUnits) -> list[OptimizerUnit]:
    return [unit for unit in units if unit.optimizer is not None]


def read_folder(path: str | os.PathLike[str], *, weights_only: bool | None = None) -> dict[str, Any]:
    """Return a folder's contents in Lightning's form; tensors are mapped into memory and read on use.

    Args:
        path: the folder.
        weights_only: False: run the code that ``lightning.pt`` names (pickle), for folders that you trust. Else it may hold
            only tensors and plain Python values.

    Raises:
        CheckpointError: if it was not written by this strategy, is damaged, or holds other objects.
    """
    found = Checkpoint(path)
    if found.state.get("kind") != "lightning":
        raise CheckpointError(
            f"{found.path} was written by an Engine, not by a Lightning trainer: load it with Engine.load, or take its tensors "
            "with safetensors and give them to the module's load_state_dict"
        )
    rest = _rest(found, runs_code=weights_only is False)
    model = found.model  # raises if the folder was replaced
    whole = {name: model[name] for name in model}
    whole.update({name: whole[first] for name, first in found.state["ties"].items()})
    optimizers = [
        {"description": description, "tensors": found.tensors(optimizer_file(number))}
        for number, description in enumerate(found.state["optimizers"])
    ]
    kept = {_STATE: {**whole, **found.extra_state}, "meshfold_micro_step": found.state["micro_step"]}
    return {**rest, **kept, **({_OPTIMIZERS: optimizers} if optimizers else {})}


def _rest(found: Checkpoint, *, runs_code: bool) -> dict[str, Any]:
    """Return everything that Lightning keeps besides tensors."""
    if not runs_code:
        try:
            rest = found.small_file(REST)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}. If it holds objects of your own and you trust whoever has written it, load it with weights_only=False "
                "(trainer.fit(..., weights_only=False), consolidate(..., weights_only=False)), or name their classes to "
                "torch.serialization.add_safe_globals"
            ) from error
    else:
        try:
            rest = torch.load(found.path_of(REST), map_location="cpu", weights_only=False)
        except Exception as error:  # from the system, the archive or the pickle
            raise CheckpointError(f"cannot read {found.path / REST}: {error}") from error
    if not isinstance(rest, dict):
        raise CheckpointError(f"{found.path / REST} holds a {type(rest).__name__}, and Lightning keeps a dict there")
    return rest


def load_module(session: Session, state: Mapping[str, Tensor], *, strict: bool) -> None:
    """Load a module's whole state dict, each rank its own blocks.

    Raises:
        CheckpointError: for names that are missing or unknown (if ``strict``), or a shape that is not the module's.
    """
    mine = session.state
    if not strict:
        state = _those_that_fit(mine, with_plain_names(state))
    mine.load(state)


def _those_that_fit(mine: ModelState, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a complete state: the given values that the module has, and the module's own for the rest."""
    names, ties = set(mine.names()), mine.ties()
    given = {ties.get(name, name): value for name, value in state.items() if name in names}
    missing = {name: source for name, source in mine.sources().items() if name not in given}
    extra = mine.extra_in(state)
    return {**given, **{name: source.read() for name, source in missing.items()}, **extra}


def load_optimizers(session: Session, states: Sequence[Any]) -> None:
    """Load each optimizer's state, from a folder or in torch's form on one device.

    Raises:
        CheckpointError: if there are more or fewer, or one is of other parameters or another class.
    """
    units = _training(session.units)
    if len(states) != len(units):
        raise CheckpointError(
            f"the checkpoint has the state of {len(states)} optimizers, and configure_optimizers() made {len(units)}: resume with "
            "those it was written with"
        )
    for unit, state in zip(units, states, strict=True):
        if "description" in state:
            description = {**state["description"], "values": with_plain_names(state["description"]["values"])}
            unit.states.load_optimizer(description, with_plain_names(state["tensors"]))
        else:
            unit.states.load_optimizer(*_from_torch(unit, state))


def _from_torch(unit: OptimizerUnit, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Split a torch optimizer's state dict into its description and tensors by name."""
    numbers, groups = _numbered(unit)
    saved = state["param_groups"]
    sizes, own = [len(group["params"]) for group in saved], [len(places) for places in groups]
    if sizes != own:
        raise CheckpointError(
            f"the checkpoint's optimizer has groups of {sizes} parameters, and {type(unit.optimizer).__name__} has groups of "
            f"{own}: resume with the optimizer it was written with"
        )
    number_here = {
        there: here
        for group, places in zip(saved, groups, strict=True)
        for there, here in zip(group["params"], places, strict=True)
    }
    names = {number: name for name, number in numbers.items()}
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for there, entries in state["state"].items():
        for key, value in entries.items():
            place = tensors if isinstance(value, Tensor) else values
            place[f"{names[number_here[there]]}/{key}"] = value
    description = {
        "class": type(unit.optimizer).__name__,
        "groups": [plain_settings(group) for group in saved],
        "values": values,
    }
    return description, tensors


def consolidate(folder: str | os.PathLike[str], file: str | os.PathLike[str], *, weights_only: bool = True) -> None:
    """Write a folder as Lightning's own file, for ``LightningModule.load_from_checkpoint`` and other strategies.

    Runs in one process, without ranks; the file has whole tensors, so it takes as much memory as they do.

    Args:
        folder: a checkpoint.
        file: where the new file goes.
        weights_only: False: run the code that the folder's ``lightning.pt`` names (pickle), for folders that you trust.

    Raises:
        CheckpointError: if the folder was not written by this strategy, or holds objects that need code to be read.
        FileWriteError: if the file cannot be written.
    """
    found = read_folder(folder, weights_only=weights_only)
    found.pop("meshfold_micro_step")
    if _OPTIMIZERS in found:
        found[_OPTIMIZERS] = [_as_torch(state) for state in found[_OPTIMIZERS]]
    write_atomically(Path(file), partial(_save, found))


def _save(content: Mapping[str, Any], path: Path) -> None:
    """Call ``torch.save``, which raises a RuntimeError without the reason if a folder is missing or a disk full.

    Raises:
        OSError: that the file cannot be written.
    """
    with path.open("wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def _as_torch(state: Mapping[str, Any]) -> dict[str, Any]:
    description, tensors = state["description"], state["tensors"]
    numbers: dict[str, int] = {}
    groups = []
    for group in description["groups"]:
        places = [numbers.setdefault(name, len(numbers)) for name in group["parameters"]]
        settings = {key: tuple(v) if isinstance(v, list) else v for key, v in group.items() if key != "parameters"}
        groups.append({**settings, "params": places})
    entries: dict[int, dict[str, Any]] = {}
    for entry, value in {**description["values"], **{name: tensors[name] for name in tensors}}.items():
        name, _, key = entry.rpartition("/")
        entries.setdefault(numbers[name], {})[key] = value
    return {"state": entries, "param_groups": groups}
