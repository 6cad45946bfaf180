"""Positions of an engine's loaders in their data, under the names that checkpoints know them by."""

from __future__ import annotations

from collections.abc import Mapping

from meshfold.engine.batches.loader import ShardedLoader


class DataPositions:
    """Loaders by name; the position of one that is yet to be made waits for it, and is saved again meanwhile."""

    def __init__(self) -> None:
        self._loaders: dict[str, ShardedLoader] = {}
        self._waiting: dict[str, dict[str, int]] = {}

    def follow(self, name: str, loader: ShardedLoader) -> None:
        """Save this loader's position from now on; it goes on where a checkpoint has stopped."""
        self._loaders[name] = loader
        if name in self._waiting:
            loader.load_state_dict(self._waiting.pop(name))

    def __contains__(self, name: object) -> bool:
        return name in self._loaders

    def state_dict(self) -> dict[str, dict[str, int]]:
        """The position of each, by name."""
        return {**self._waiting, **{name: loader.state_dict() for name, loader in self._loaders.items()}}

    def check(self, state: Mapping[str, dict[str, int]]) -> None:
        """Raise what :meth:`load_state_dict` would, and change nothing."""
        for name, loader in self._loaders.items():
            if name in state:
                loader.position(state[name])

    def load_state_dict(self, state: Mapping[str, dict[str, int]]) -> None:
        """Bring the loaders that are here to their positions; the other positions wait."""
        self._waiting = dict(state)
        for name, loader in self._loaders.items():
            if name in self._waiting:
                loader.load_state_dict(self._waiting.pop(name))
