"""Settings that a run's folder remembers, so that ``--resume`` need not be told again and can see what is new."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from meshfold.checkpoint.files import parse_json_object, write_atomically
from meshfold.checkpoint.state import CHECKSUM, has_valid_checksum, with_checksum
from meshfold.mesh import SpecError
from meshfold.train.settings import TrainSettings

FILE = "settings.json"
OPTIONS = {"changes": "--set", "rules": "--rule", "track": "--metrics"}
"""Options of ``meshfold train`` whose names are not those of the settings"""

# Of one start: where it writes, how far it goes, on which kind of device.
_NOT_KEPT = ("out", "resume", "stop_after", "device")
_FIELDS = {field.name: field for field in fields(TrainSettings) if field.name not in _NOT_KEPT}
_PATHS = ("data", "hf", "tokenizer")
# The place in the data is a number of batches, in an order that the seed makes: with others it would be another place.
_FIXED = ("batch_size", "seq_len", "seed")
# What is trained stays the same with another of these.
_UNSAID = (
    "parallel", "prompt", "sample_tokens", "eval_every", "eval_batches", "save_every", "save_asynchronously", "track",
    "peak_tflops", "watchdog",
)  # fmt: skip


def option_of(name: str) -> str:
    """Return the option of ``meshfold train`` for a setting."""
    return OPTIONS.get(name, "--" + name.replace("_", "-"))


def keep(settings: TrainSettings, data_size: int) -> None:
    """Write down the settings of a run; rank 0 calls.

    Args:
        settings: the run's.
        data_size: of the mesh, where the spec leaves ``data`` to the number of ranks.
    """
    path = Path(settings.out) / FILE
    found = _plain(settings)
    if "data" not in settings.parallel and data_size > 1:
        found["parallel"]["data"] = data_size
    for name in list(found):
        try:
            json.dumps(found[name])
        except TypeError:  # a spec with objects in it, from a file: it has to be given again
            del found[name]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda part: part.write_text(json.dumps(with_checksum(found), indent=1)))


def kept(out: str) -> dict[str, Any]:
    """Return what was written down; nothing where nothing was.

    Raises:
        SpecError: for a value that cannot be a setting, or a file that is damaged.
    """
    path = Path(out) / FILE
    try:
        found = parse_json_object(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise SpecError(
            f"cannot read {path}: {error}. Remove it, and type the options of the run again"
        ) from error
    if CHECKSUM in found and not has_valid_checksum(found):
        raise SpecError(
            f"{path} is damaged or was changed by hand: its checksum does not fit. To keep a change made by hand, remove its entry "
            f'"{CHECKSUM}"'
        )
    for name, field in _FIELDS.items():
        if name in found and not _is_a(found[name], str(field.type)):
            raise SpecError(
                f"{path} has {name}={found[name]!r}, and {option_of(name)} is no such value: mend the file, or remove it and "
                "type the options of the run again"
            )
    return {name: _tuples(found[name]) for name in _FIELDS if name in found}


def what_is_new(settings: TrainSettings, before: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each setting that changes where a run goes on.

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
                f"{option} {now[name]}: the run in {settings.out!r} has {option} {was}, and goes on in the order of its data: "
                f"leave {option} out, or start anew in another --out"
            )
        said.append(f"{option} is {_shown(now[name])} from here on; it was {_shown(was)}")
    return said


def _plain(settings: TrainSettings) -> dict[str, Any]:
    """Return the settings to keep, paths so that they hold in another folder too."""
    found = {name: getattr(settings, name) for name in _FIELDS}
    for name in _PATHS:
        if found[name] is not None and not (name == "tokenizer" and found[name] == "byte"):
            found[name] = str(Path(found[name]).absolute())
    found["parallel"] = dict(found["parallel"])
    return found


def _is_a(value: object, types: str) -> bool:
    """Tell whether a value read from JSON is of one of the types of a field, such as ``int | None``."""
    kinds = [kind.partition("[")[0].strip() for kind in types.split("|")]
    names = {bool: "bool", int: "int", float: "float", str: "str", list: "tuple", dict: "dict"}
    own = names.get(type(value), "None")
    return own in kinds or (own == "int" and "float" in kinds)


def _tuples(value: Any) -> Any:
    """Return a value with tuples for lists, which JSON has instead."""
    if isinstance(value, Mapping):
        return {name: _tuples(inner) for name, inner in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def _shown(value: Any) -> str:
    if value is None or value in ((), {}):
        return "not given"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return str(value)
