"""The checkpoints of a run: where the next one goes, which one a run goes on from, and which of the older ones go.

::

    OUT/checkpoint/                   where one is kept: the last one, each in the place of the one before
    OUT/checkpoints/step-00000120/    where several are
"""

from __future__ import annotations

from pathlib import Path

from meshfold.checkpoint.folder import (
    STATE_FILE,
    all_checkpoints,
    complete_checkpoints,
    is_complete,
    prune,
    remove_checkpoint,
    remove_leftovers,
    set_aside_path,
    step_folder,
    step_of,
)
from meshfold.checkpoint.state import listed_files, read_state
from meshfold.engine.checkpoints import Checkpoint


class KeptCheckpoints:
    """Those in the folder of a run, of which the newest few are kept. Without communication.

    Attributes:
        keep: how many.
    """

    def __init__(self, out: str | Path, keep: int) -> None:
        """Args:
        out: the run's folder.
        keep: 1 for one that is replaced, more for one a step.
        """
        self.keep = keep
        self._single, self._several = Path(out) / "checkpoint", Path(out) / "checkpoints"

    def place(self, step: int) -> Path:
        """Return the folder for the checkpoint of a step."""
        return self._single if self.keep == 1 else step_folder(self._several, step)

    def make_room(self, step: int) -> Path | None:
        """Move a damaged checkpoint aside from where that of a step goes; one rank calls.

        Nothing of it is removed: its index does not say any more which files are its own.

        Returns:
            Where it is now; None if nothing was in the way.
        """
        place = self.place(step)
        if (
            place == self._single
            or not (place / STATE_FILE).exists()
            or listed_files(place / STATE_FILE) is not None
        ):
            return None
        numbered = (place.with_name(f"{place.name}.damaged{number}") for number in ("", *range(2, 1000)))
        return place.rename(next(path for path in numbered if not path.exists()))

    def there(self) -> list[Path]:
        """The checkpoints of the run, whole or damaged; what is under way is none."""
        single = [self._single] if self._single.exists() or set_aside_path(self._single).exists() else []
        return all_checkpoints(self._several) + single

    def damaged(self) -> list[Path]:
        """Those that are not complete."""
        whole = self._complete()
        return [path for path in self.there() if path not in whole]

    def to_go_on_from(self) -> Path | None:
        """The newest complete checkpoint, or None if there is none at all.

        Raises:
            CheckpointError: if there are some, and none is complete: what is wrong with the newest of them.
        """
        found = self._complete()
        if found:
            return found[0]
        damaged = self.damaged()
        if damaged:
            Checkpoint(damaged[0])
        return damaged[0] if damaged else None

    def prune(self) -> list[Path]:
        """Remove all but the newest complete ones, and what dead processes have left beside them; one rank calls.

        What is under way does not count, and stays.

        Returns:
            Those that went.

        Raises:
            CheckpointError: if one cannot be removed.
        """
        found = self._complete()
        stay, gone = found[: self.keep], found[self.keep :]
        several = len([path for path in stay if path != self._single])
        if several:
            prune(self._several, several)  # and what dead processes have left there
        for path in gone:
            remove_checkpoint(path)
        if self._single in stay:
            remove_leftovers(self._single)
        return gone

    def _complete(self) -> list[Path]:
        """The complete ones, the newest first."""
        found = {path: step_of(path) for path in complete_checkpoints(self._several)}
        single = next(
            (path for path in (self._single, set_aside_path(self._single)) if is_complete(path)), None
        )
        if single is not None:
            state = read_state(single / STATE_FILE)
            found[self._single] = int(state.get("step", 0)) + int(state.get("skipped_steps", 0))
        return sorted(found, key=lambda path: (found[path], path == self.place(found[path])))[::-1]
