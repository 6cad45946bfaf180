"""The state of a pipelined model as a whole: owners read it, and all ranks get it.

Names are as in the whole model, recorded before it was cut. A rank receives missing tensors from the first rank of the pipeline
that has them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from meshfold.checkpoint.shards import ShardRule, no_shards
from meshfold.engine.checkpoints.model_state import ModelState
from meshfold.engine.model.pipelined_model import Inventory
from meshfold.engine.states.optimizer_state import check_names
from meshfold.engine.states.protocols import Source, States
from meshfold.engine.world import World
from meshfold.mesh import SpecError, broadcast
from meshfold.mesh.collectives import all_gather_object
from meshfold.mesh.parameters import StoredValue

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A tensor of the whole model, and the pipeline rank that reads it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    alike: bool
    owner: int


class PipelinedState(ModelState):
    """See :class:`ModelState`; all ranks of a pipeline must call its reading methods."""

    def __init__(self, model: nn.Module, states: States, world: World, inventory: Inventory) -> None:
        """Raises:
        SpecError: if the ranks' optimizers have different groups.
        """
        super().__init__(model, states, world)
        self._inventory = inventory
        self._local = inventory.called_here([*self.tensors()])
        tensors = self.tensors()
        self._trained = {first for first, name in self._local.items() if tensors[name].requires_grad}
        sources = {name: states.source(tensor) for name, tensor in self.unique().items()}
        self._kept = self._merged(sources, _used(inventory, self._local))
        if states.optimizer is not None:
            self.optimizer_description()

    # -- the model's --------------------------------------------------------------------------------------------

    def names(self) -> Iterable[str]:
        return self._inventory.first

    def unique(self) -> dict[str, Tensor]:
        tensors = self.tensors()
        return {first: tensors[name] for first, name in self._local.items()}

    def ties(self) -> dict[str, str]:
        return {name: first for name, first in self._inventory.first.items() if name != first}

    def sources(self) -> dict[str, Source]:
        here = self.unique()
        found = {}
        for name in dict.fromkeys(self._inventory.first.values()):
            own = self._states.source(here[name]) if name in here else None
            found[name] = self._shared(self._kept[name], own)
        return found

    def noted_sources_and_ties(self) -> tuple[dict[str, Source], dict[str, str]]:
        return self.sources(), self.ties()

    def extra_names(self) -> Collection[str]:
        return self._inventory.extra

    def _merged_extra(self, mine: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Merge the extra state, taking each module's from the rank whose stages use it."""
        used = _used(self._inventory, {name: name for name in mine})
        told = self._tell([mine, sorted(used)])
        found: dict[str, dict[str, Any]] = {}
        for entries, _ in reversed(told):
            found.update(entries)
        for entries, names in reversed(told):
            found.update({name: entries[name] for name in names})
        return {name: found[name] for name in self._inventory.extra if name in found}

    # -- the optimizer's ----------------------------------------------------------------------------------------

    def optimizer_sources(self) -> dict[str, Source]:
        own = self._states.optimizer_sources()
        merged = self._merged(own, set(own))
        return {name: self._shared(kept, own.get(name)) for name, kept in merged.items()}

    def noted_optimizer_sources(self) -> dict[str, Source]:
        return self.optimizer_sources()  # runs collectives, which must not interleave with training's

    def optimizer_description(self) -> dict[str, Any]:
        told = self._tell(self._states.optimizer_description())
        first = told[0]
        settings = [[_settings(group) for group in one["groups"]] for one in told]
        if any(one != settings[0] for one in settings):
            raise SpecError(
                "pipeline: the optimizer makes different parameter groups for different stages "
                f"({[len(one) for one in settings]} groups): make the same groups for any parameters, even if some are empty"
            )
        groups = []
        for parts in zip(*(one["groups"] for one in told), strict=True):
            members = {name for part in parts for name in part["parameters"]}
            groups.append({**parts[0], "parameters": [n for n in self._inventory.first if n in members]})
        values: dict[str, Any] = {}
        for one in told:
            values = {**one["values"], **values}
        return {"class": first["class"], "groups": groups, "values": values}

    def check_optimizer(self, description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().check_optimizer(*self._mine(description, tensors))

    def load_optimizer(self, description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().load_optimizer(*self._mine(description, tensors))

    # -- within -------------------------------------------------------------------------------------------------

    def _mine(
        self, description: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the optimizer state of this rank's parameters."""
        check_names((*tensors, *description["values"]), self._inventory.parameters)

        def here(entries: Mapping[str, T]) -> dict[str, T]:
            names = {entry: entry.rpartition("/")[0] for entry in entries}
            return {entry: entries[entry] for entry, n in names.items() if n in self._trained or n in self._local}

        return {**description, "values": here(description["values"])}, here(tensors)

    def _tell(self, mine: Any) -> list[Any]:
        return all_gather_object(mine, self._world.pipe_group, self._world.device)

    def _merged(self, sources: Mapping[str, Source], used: set[str]) -> dict[str, Kept]:
        """Merge the tables of all ranks; a rank that uses a tensor takes precedence over one that only holds it."""
        mine = {
            name: [str(source.dtype).removeprefix("torch."), list(source.shape), source.alike, name in used]
            for name, source in sources.items()
        }
        found: dict[str, Kept] = {}
        certain: set[str] = set()
        for owner, told in enumerate(self._tell(mine)):
            for name, (dtype, shape, alike, uses) in told.items():
                if name not in found or (uses and name not in certain):
                    kind = getattr(torch, dtype)
                    found[name] = Kept(dtype=kind, shape=tuple(shape), alike=alike, owner=owner)
                if uses:
                    certain.add(name)
        return found

    def _shared(self, kept: Kept, own: Source | None) -> Source:
        read = partial(self._read, kept, own)
        owns = own is not None and self._world.pipe_group.index == kept.owner
        if own is not None and owns:
            return Source(
                dtype=kept.dtype,
                shape=kept.shape,
                read=read,
                cut=own.cut,
                parts=own.parts,
                alike=kept.alike,
                on_disk=own.on_disk,
            )
        return Source(
            dtype=kept.dtype,
            shape=kept.shape,
            read=read,
            cut=lambda: ShardRule(no_shards),
            parts=lambda: StoredValue(()),
            alike=kept.alike,
        )

    def _read(self, kept: Kept, own: Source | None) -> Tensor:
        """Return the owner's result on all ranks; a collective over the pipeline."""
        group, device = self._world.pipe_group, self._world.device
        error: Exception | None = None
        value: Tensor | None = None
        if own is not None and group.index == kept.owner:
            try:
                value = own.read().to(device)
            except Exception as unread:  # the others wait for a message
                error = unread
        if value is None:
            value = torch.zeros(kept.shape, dtype=kept.dtype, device=device)
        value = broadcast(value.contiguous(), group, kept.owner)
        if error is not None:
            raise error
        return value


def _used(inventory: Inventory, local: Mapping[str, str]) -> set[str]:
    """Return the tensors of a rank that its stages use: parameters, and buffers of modules that have parameters there.

    A buffer of a module without parameters counts for the nearest enclosing module that has some.
    """
    parts = [name for name in inventory.first if inventory.first[name] in inventory.parameters]
    here = [name for name in local.values() if inventory.first.get(name, name) in inventory.parameters]

    def used(name: str) -> bool:
        if name in inventory.parameters:
            return True
        path = name
        while path:
            path = path.rpartition(".")[0]
            prefix = f"{path}." if path else ""
            if any(part.startswith(prefix) for part in parts):
                return any(part.startswith(prefix) for part in here)
        return True

    return {first for first in local if used(first)}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "parameters"}
