"""The folder of a run: its lock, its checkpoints, and the settings that ``--resume`` reads.

::

    OUT/.run.lock                     held by rank 0 from the start of its engine to the end of the run
    OUT/settings.json                 the options of the run
    OUT/checkpoint/                   with ``--keep 1``: the last checkpoint, which the next one replaces
    OUT/checkpoints/step-00000120/    with ``--keep 2`` and more: one folder a checkpoint
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

from meshfold.checkpoint import CheckpointError, InUseError
from meshfold.checkpoint.files import parse_json_object, write_atomically
from meshfold.checkpoint.folder import (
    STATE_FILE,
    all_checkpoints,
    complete_checkpoints,
    hold_lock,
    is_complete,
    is_locked,
    prune,
    remove_checkpoint,
    remove_leftovers,
    set_aside_path,
    step_folder,
    step_of,
)
from meshfold.checkpoint.state import CHECKSUM, has_valid_checksum, listed_files, read_state, with_checksum
from meshfold.engine.checkpoints import Checkpoint
from meshfold.engine.world import World, fail_together
from meshfold.mesh import MeshfoldError, SpecError
from meshfold.train.settings import TrainSettings

LOCK = ".run.lock"
_DOING = "training into it"
_RETRY_S = 1.0  # other processes take the lock for an instant to test it


def check_free(out: str) -> None:
    """Raise the error of :func:`hold_folder` if another run is writing there now."""
    lock = Path(out) / LOCK
    if is_locked(lock):
        with hold_lock(lock, doing=_DOING):
            pass


def hold_folder(settings: TrainSettings, world: World) -> ExitStack:
    """Lock the run's folder for rank 0, until the returned context is closed; all ranks must call.

    Raises:
        CheckpointError: on all ranks, if another run is writing there, or has finished there since this one began.
    """
    held = ExitStack()
    error: Exception | None = None
    if world.mesh.rank == 0:
        out = Path(settings.out)
        try:
            out.mkdir(parents=True, exist_ok=True)
            _take(held, out / LOCK)
            there = settings.checkpoints.there()
            if there and not settings.resume:
                raise CheckpointError(f"another run has finished there in the meantime: {there[0]}")
        except (MeshfoldError, OSError) as found:
            held.close()
            error = found
    fail_together(world, error, f"--out {settings.out!r}", name_rank=False)
    return held


def _take(held: ExitStack, lock: Path) -> None:
    deadline = time.monotonic() + _RETRY_S
    while True:
        try:
            held.enter_context(hold_lock(lock, doing=_DOING))
            return
        except InUseError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S / 10)


class KeptCheckpoints:
    """Checkpoints in the folder of a run; the newest ``keep`` are kept. No communication.

    Attributes:
        keep: number of checkpoints.
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
        """Move a damaged checkpoint out of the way of a step's; call it on one rank.

        Nothing is removed: without a readable index its files are not known.

        Returns:
            Its new path, or None if nothing was in the way.
        """
        place = self.place(step)
        if place == self._single or not (place / STATE_FILE).exists() or listed_files(place / STATE_FILE) is not None:
            return None
        numbered = (place.with_name(f"{place.name}.damaged{number}") for number in ("", *range(2, 1000)))
        return place.rename(next(path for path in numbered if not path.exists()))

    def there(self) -> list[Path]:
        """Return the checkpoints of the run, complete or damaged, without those that are being written."""
        single = [self._single] if self._single.exists() or set_aside_path(self._single).exists() else []
        return all_checkpoints(self._several) + single

    def damaged(self) -> list[Path]:
        """Return the checkpoints that are not complete."""
        whole = self._complete()
        return [path for path in self.there() if path not in whole]

    def to_go_on_from(self) -> Path | None:
        """Return the newest complete checkpoint, or None if the run has no checkpoint.

        Raises:
            CheckpointError: if no checkpoint is complete; says why the newest is not.
        """
        found = self._complete()
        if found:
            return found[0]
        damaged = self.damaged()
        if damaged:
            Checkpoint(damaged[0])
        return damaged[0] if damaged else None

    def prune(self) -> list[Path]:
        """Remove all but the newest complete checkpoints, and leftovers of dead processes; one rank calls.

        Checkpoints that are being written do not count and stay.

        Returns:
            The removed checkpoints.

        Raises:
            CheckpointError: if one cannot be removed.
        """
        found = self._complete()
        stay, gone = found[: self.keep], found[self.keep :]
        several = len([path for path in stay if path != self._single])
        if several:
            prune(self._several, several)  # also removes leftovers of killed processes
        for path in gone:
            remove_checkpoint(path)
        if self._single in stay:
            remove_leftovers(self._single)
        return gone

    def _complete(self) -> list[Path]:
        """Return the complete checkpoints, newest first."""
        found = {path: step_of(path) for path in complete_checkpoints(self._several)}
        single = next((path for path in (self._single, set_aside_path(self._single)) if is_complete(path)), None)
        if single is not None:
            state = read_state(single / STATE_FILE)
            found[self._single] = int(state.get("step", 0)) + int(state.get("skipped_steps", 0))
        return sorted(found, key=lambda path: (found[path], path == self.place(found[path])))[::-1]


SETTINGS_FILE = "settings.json"
OPTIONS = {"changes": "--set", "rules": "--rule", "track": "--metrics"}
"""Options of ``meshfold train`` whose names differ from the settings'"""

# Settings of one start: where it writes, how far it goes, on which kind of device.
_NOT_KEPT = ("out", "resume", "stop_after", "device")
_FIELDS = {field.name: field for field in fields(TrainSettings) if field.name not in _NOT_KEPT}
_PATHS = ("data", "hf", "tokenizer")
# A position in the data is a count of batches, in an order drawn from the seed: other values would move it.
_FIXED = ("batch_size", "seq_len", "seed")
# The trained model does not depend on these.
_UNSAID = (
    "parallel",
    "prompt",
    "sample_tokens",
    "eval_every",
    "eval_batches",
    "save_every",
    "save_asynchronously",
    "track",
    "peak_tflops",
    "watchdog",
)


def option_of(name: str) -> str:
    """Return the option of ``meshfold train`` for a setting."""
    return OPTIONS.get(name, "--" + name.replace("_", "-"))


def write_settings(settings: TrainSettings, data_size: int) -> None:
    """Write the settings of a run; rank 0 calls.

    Args:
        settings: the run's.
        data_size: of the mesh, if the spec leaves ``data`` to the number of ranks.
    """
    path = Path(settings.out) / SETTINGS_FILE
    found = _plain(settings)
    if "data" not in settings.parallel and data_size > 1:
        found["parallel"]["data"] = data_size
    for name in list(found):
        try:
            json.dumps(found[name])
        except TypeError:  # the spec has objects, from a file: it must be given again on resume
            del found[name]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda part: part.write_text(json.dumps(with_checksum(found), indent=1)))


def read_settings(out: str) -> dict[str, Any]:
    """Return the settings that a run wrote to its folder, or an empty dict.

    Raises:
        SpecError: for an invalid value, or a damaged file.
    """
    path = Path(out) / SETTINGS_FILE
    try:
        found = parse_json_object(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise SpecError(f"cannot read {path}: {error}. Remove it, and type the options of the run again") from error
    if CHECKSUM in found and not has_valid_checksum(found):
        raise SpecError(
            f"{path} is damaged or was changed by hand: its checksum does not match. To keep a change made by hand, remove its "
            f'entry "{CHECKSUM}"'
        )
    for name, field in _FIELDS.items():
        if name in found and not _is_a(found[name], str(field.type)):
            raise SpecError(
                f"{path} has {name}={found[name]!r}, and {option_of(name)} does not accept that: correct the file, or remove it "
                "and type the options of the run again"
            )
    return {name: _tuples(found[name]) for name in _FIELDS if name in found}


def describe_changes(settings: TrainSettings, before: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each setting that changes when a run resumes.

    Raises:
        SpecError: for one that must not.
    """
    said = []
    now = {name: _tuples(value) for name, value in _plain(settings).items()}
    for name, was in before.items():
        if now[name] == was or name in _UNSAID:
            continue
        option = option_of(name)
        if name in _FIXED:
            raise SpecError(
                f"{option} {now[name]}: the run in {settings.out!r} has {option} {was}, and continues in the order of its data: "
                f"leave {option} out, or start over in another --out"
            )
        said.append(f"{option} is {_shown(now[name])} from here on; it was {_shown(was)}")
    return said


def _plain(settings: TrainSettings) -> dict[str, Any]:
    """Return the settings to keep, with absolute paths."""
    found = {name: getattr(settings, name) for name in _FIELDS}
    for name in _PATHS:
        if found[name] is not None and not (name == "tokenizer" and found[name] == "byte"):
            found[name] = str(Path(found[name]).absolute())
    found["parallel"] = dict(found["parallel"])
    return found


def _is_a(value: object, types: str) -> bool:
    """Return True if a value read from JSON has one of the field's types, such as ``int | None``."""
    kinds = [kind.partition("[")[0].strip() for kind in types.split("|")]
    names = {bool: "bool", int: "int", float: "float", str: "str", list: "tuple", dict: "dict"}
    own = names.get(type(value), "None")
    return own in kinds or (own == "int" and "float" in kinds)


def _tuples(value: Any) -> Any:
    """Convert lists to tuples: JSON has no tuples."""
    if isinstance(value, Mapping):
        return {name: _tuples(inner) for name, inner in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def _shown(value: Any) -> str:
    if value is None or value in ((), {}):
        return "not given"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return str(value)
