"""``state.json``: the description of a checkpoint, checked before anything of it is used.

It lists the checkpoint's other files with sizes and checksums, and has its own checksum. Files from before there were checksums
have none, and are also read.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meshfold.checkpoint.errors import CheckpointError
from meshfold.checkpoint.file_names import may_be_listed
from meshfold.checkpoint.files import parse_json_object

FORMAT_WHOLE, FORMAT_SHARDED = 2, 3
"""Whole tensors; tensors in rectangles (:mod:`meshfold.engine.checkpoints.saving`). 1 had each file whole."""

_READ = (1, FORMAT_WHOLE, FORMAT_SHARDED)
CHECKSUM, FILES, CHECKSUMS = "checksum", "files", "sums"

_ELSEWHERE = "Copy the checkpoint from its source again, or resume from an earlier one"


def with_checksum(state: Mapping[str, Any]) -> dict[str, Any]:
    """Add the checksum. Values must be as JSON returns them."""
    plain = json.loads(json.dumps({key: value for key, value in state.items() if key != CHECKSUM}))
    return {**plain, CHECKSUM: _checksum(plain)}


def has_valid_checksum(state: Mapping[str, Any]) -> bool:
    """Return True if the checksum matches the other values."""
    return bool(state.get(CHECKSUM) == _checksum({key: value for key, value in state.items() if key != CHECKSUM}))


def parse_state(text: bytes, path: Path) -> dict[str, Any]:
    """Parse and check a ``state.json``.

    Args:
        text: of the file.
        path: where it was read, for messages.

    Raises:
        CheckpointError: if it is damaged, not of a checkpoint, or of a later version.
    """
    try:
        state = parse_json_object(text)
    except ValueError as error:
        raise CheckpointError(f"cannot read {path}: {error}. {_ELSEWHERE}") from error
    if "format" not in state:
        raise CheckpointError(f"{path} is not a checkpoint's: it has no format. Another program wrote it")
    if not _is_count(state["format"]) or state["format"] not in _READ:
        raise CheckpointError(
            f"{path.parent} has format {state['format']!r}, but this version of Meshfold reads formats up to "
            f"{FORMAT_SHARDED}: use a later version"
        )
    if CHECKSUM in state and not has_valid_checksum(state):
        raise CheckpointError(
            f"{path} is damaged or was changed by hand: its checksum does not match. {_ELSEWHERE}. To keep a change made by "
            f'hand, remove the entry "{CHECKSUM}"'
        )
    for key, (is_right, what) in _ENTRIES.items():
        if key in state and not is_right(state[key]):
            raise CheckpointError(f"{path} is damaged: its {key} is not {what}. {_ELSEWHERE}")
    if not any(name.startswith("model") for name in state.get(FILES, ())):
        raise CheckpointError(f"{path} is not a checkpoint's: it lists no file of a model. Another program wrote it")
    return state


def read_state(path: Path) -> dict[str, Any]:
    """Read and check the ``state.json`` at a path.

    Raises:
        CheckpointError: see :func:`parse_state`.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    return parse_state(text, path)


def listed_files(path: Path) -> dict[str, int] | None:
    """Return the files that a ``state.json`` lists, with sizes; None if it is not a checkpoint's or cannot be read."""
    try:
        files: dict[str, int] = read_state(path).get(FILES, {})
    except CheckpointError:
        return None
    return files


def identity(state: Mapping[str, Any]) -> str:
    """Return the identity of a checkpoint: 16 hexadecimal digits; ``""`` for one without a checksum."""
    return str(state.get(CHECKSUM, ""))


def file_checksum(path: Path) -> str:
    """Return the CRC-32 of a file; for a safetensors file, the checksum of its header, which has a checksum of each tensor."""
    with path.open("rb") as file:
        if path.suffix != ".safetensors":
            return f"{zlib.crc32(file.read()):08x}"
        length = file.read(8)
        return f"{zlib.crc32(file.read(int.from_bytes(length, 'little')), zlib.crc32(length)):08x}"


def _checksum(plain: Mapping[str, Any]) -> str:
    """Return a checksum of the values, not of the text, so that reformatting the JSON does not change it."""
    try:
        text = json.dumps(plain, sort_keys=True)
    except RecursionError:
        return ""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# -- what each entry must be --------------------------------------------------------------------------------------


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _is_count(value: Any) -> bool:
    return _is_whole(value) and value >= 0


def _is_number(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_map(value: Any, of: Callable[[Any], bool], named: Callable[[str], bool] = lambda _: True) -> bool:
    return isinstance(value, dict) and all(named(key) and of(entry) for key, entry in value.items())


def _is_optimizer(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and _is_text(value.get("class"))
        and isinstance(value.get("values"), dict)
        and isinstance(groups := value.get("groups"), list)
        and all(isinstance(group, dict) and _are_names(group.get("parameters")) for group in groups)
    )


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_model(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict) and _is_text(value.get("kind")) and isinstance(value.get("config"), dict)
    )


def _is_scaler(value: Any) -> bool:
    if value == {}:  # the folder was converted
        return True
    return _is_map(value, _is_number) and {"scale", "good_steps", "overflows"} <= value.keys()


def _is_position(value: Any) -> bool:
    return _is_map(value, _is_whole) and {"epoch", "served"} <= value.keys()


_ENTRIES: dict[str, tuple[Callable[[Any], bool], str]] = {
    FILES: (lambda value: _is_map(value, _is_count, may_be_listed), "a table of files and their sizes"),
    CHECKSUMS: (
        lambda value: _is_map(value, _is_text, may_be_listed),
        "a table of files and their checksums",
    ),
    "kind": (_is_text, "a text"),
    "spec": (_is_text, "a text"),
    "precision": (lambda value: value is None or _is_text(value), "a text"),
    "seed": (_is_whole, "a whole number"),
    "step": (_is_count, "a count"),
    "micro_step": (_is_count, "a count"),
    "skipped_steps": (_is_count, "a count"),
    "scaler": (_is_scaler, "a loss scale with its counters"),
    "ties": (lambda value: _is_map(value, _is_text), "a table of names"),
    "extra_state": (lambda value: isinstance(value, dict), "a table of extra state"),
    "model": (_is_model, "a model's kind and configuration"),
    "data": (lambda value: _is_map(value, _is_position), "a table of positions"),
    "optimizer": (_is_optimizer, "an optimizer's class, groups and values"),
    "optimizers": (
        lambda value: isinstance(value, list) and all(map(_is_optimizer, value)),
        "a list of optimizers",
    ),
}
