"""Kinds of damage. Each changes one file of a folder, and says in a few words what it did."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    7,
    2**31,
    2**40,
    2**63,
    -(2**70),
    0.5,
    -1.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "..",
    "../x",
    "/etc/passwd",
    "F64",
    "BF16",
    "int8",
    "a\0b",
    [],
    [1],
    [-1],
    [2**40],
    [[]],
    {},
    {"a": 1},
    "9" * 5000,
)
"""Values that take the place of others in JSON."""


class NotApplicable(Exception):
    """This damage has nothing to do in such a file."""


def flip(path: Path, dice: random.Random, other: Path) -> str:
    """Flip one bit."""
    data = bytearray(path.read_bytes())
    at = _index(data, dice)
    bit = dice.randrange(8)
    data[at] ^= 1 << bit
    path.write_bytes(data)
    return f"bit {bit} of byte {at}"


def overwrite(path: Path, dice: random.Random, other: Path) -> str:
    """Write random bytes over some."""
    data = bytearray(path.read_bytes())
    at = _index(data, dice)
    new = dice.randbytes(dice.choice((1, 2, 4, 8, 64)))[: len(data) - at]
    if bytes(data[at : at + len(new)]) == new:
        raise NotApplicable
    data[at : at + len(new)] = new
    path.write_bytes(data)
    return f"{len(new)} bytes from byte {at} on"


def cut(path: Path, dice: random.Random, other: Path) -> str:
    """Cut the end off."""
    data = path.read_bytes()
    at = _index(data, dice)
    path.write_bytes(data[:at])
    return f"cut at byte {at}"


def append(path: Path, dice: random.Random, other: Path) -> str:
    """Add bytes at the end."""
    new = dice.choice((b"\0", b"\0" * 64, b"}", dice.randbytes(100)))
    path.write_bytes(path.read_bytes() + new)
    return f"{len(new)} bytes more"


def remove(path: Path, dice: random.Random, other: Path) -> str:
    """Remove it, or put something else in its place."""
    path.unlink()
    what = dice.choice(("removed", "a folder", "a link outside", "a link to nowhere", "empty"))
    if what == "a folder":
        path.mkdir()
    elif what == "empty":
        path.touch()
    elif what != "removed":
        path.symlink_to("/etc/passwd" if what == "a link outside" else "/nowhere/at/all")
    return what


def swap(path: Path, dice: random.Random, other: Path) -> str:
    """Put a file of another folder of the same kind in its place, or let two files of the folder change places."""
    beside = [
        one for one in sorted(path.parent.iterdir()) if one.is_file() and one.suffix == path.suffix and one != path
    ]
    if beside and dice.random() < 0.5:
        chosen = dice.choice(beside)
        mine, theirs = path.read_bytes(), chosen.read_bytes()
        if mine == theirs:
            raise NotApplicable
        path.write_bytes(theirs)
        chosen.write_bytes(mine)
        return f"changed places with {chosen.name}"
    twin = other / path.name
    if not twin.is_file() or twin.read_bytes() == path.read_bytes():
        raise NotApplicable
    shutil.copyfile(twin, path)
    return "taken from another folder"


def mutate_json(path: Path, dice: random.Random, other: Path) -> str:
    """Change a value, a name, or the order of a JSON file."""
    if path.suffix not in (".json", ".jsonl"):
        raise NotApplicable
    if path.suffix == ".jsonl":
        lines = path.read_text().splitlines()
        at = dice.randrange(len(lines))
        value, what = mutated(json.loads(lines[at]), dice)
        lines[at] = _text(value)
        path.write_text("\n".join(lines) + "\n")
        return f"line {at + 1}: {what}"
    if dice.random() < 0.05:
        path.write_text("[" * 100_000)
        return "100,000 brackets"
    value, what = mutated(json.loads(path.read_text()), dice)
    path.write_text(_text(value))
    return what


def mutate_header(path: Path, dice: random.Random, other: Path) -> str:
    """Change the header of a safetensors file; its length fits it."""
    if path.suffix != ".safetensors":
        raise NotApplicable
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    value, what = mutated(header, dice)
    text = _text(value).encode(errors="surrogatepass")
    path.write_bytes(len(text).to_bytes(8, "little") + text + rest)
    return what


KINDS: dict[str, Callable[[Path, random.Random, Path], str]] = {
    "bit flipped": flip,
    "bytes overwritten": overwrite,
    "cut off": cut,
    "extended": append,
    "removed or replaced": remove,
    "swapped": swap,
    "JSON changed": mutate_json,
    "header changed": mutate_header,
}


def mutated(value: Any, dice: random.Random) -> tuple[Any, str]:
    """Return JSON with one thing changed, and what it was."""
    places = [*_places(value)]
    if not places:
        return dice.choice(ODD), "all of it"
    holder, key = dice.choice(places)
    where = str(key)[:40]
    match dice.randrange(7):
        case 0 if isinstance(holder, dict):
            del holder[key]
            return value, f"without {where!r}"
        case 1 if isinstance(holder, dict):
            holder[f"{key}x"] = holder.pop(key)
            return value, f"{where!r} renamed"
        case 2 if isinstance(holder, list):
            holder.append(holder[key])
            return value, f"item {where} twice"
        case 3 if isinstance(holder[key], int) and not isinstance(holder[key], bool):
            holder[key] += dice.choice((-1, 1, 8, 2**33))
            return value, f"{where!r} is {holder[key]}"
        case 4 if len(holder) > 1:
            other = dice.choice(
                [one for one in (holder if isinstance(holder, dict) else range(len(holder))) if one != key]
            )
            holder[key], holder[other] = holder[other], holder[key]
            return value, f"{where!r} and {str(other)[:40]!r} changed places"
        case _:
            holder[key] = dice.choice(ODD)
            return value, f"{where!r} is {str(holder[key])[:40]!r}"


def _places(value: Any) -> Any:
    """Yield every place of a value: what holds it, and its key or number there."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _text(value: Any) -> str:
    return json.dumps(value)


def _index(data: bytes | bytearray, dice: random.Random) -> int:
    if not data:
        raise NotApplicable
    # Headers and indexes are at the beginning of most files: there more can go wrong.
    return dice.randrange(min(len(data), 400)) if dice.random() < 0.3 else dice.randrange(len(data))
