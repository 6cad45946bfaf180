"""Machines as JSON files: what ``meshfold calibrate`` writes and ``--machine FILE`` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any

from meshfold.mesh import SpecError, did_you_mean
from meshfold.planner.efficiency import Efficiency, Launches, Link
from meshfold.planner.machines import KINDS, Host, Machine

_VERSION = 1
_WORDS = {"name", "source", "kind"}
_SIZES = {"by_flop": "FLOP", "by_side": "side", "by_output": "elements"}
"""Tables of a product's shares, and what their pairs rise by."""
_MAY_BE_ZERO = {
    "launch",
    *(field.name for field in fields(Launches)),
    "hidden",
    "hidden_by_kind",
    "start",
    "pace",
    "stepping",
    "moments",
    "stepping_of_one",
    "moments_of_one",
    "streaming",
    "stepping_while_streaming",
    "error",
    "lag",
    "latency",
    "disk",
    "disk_read",
    "disk_write",
}


def write_machine(machine: Machine, path: Path, samples: Mapping[str, Any]) -> None:
    """Write a machine as JSON.

    Args:
        machine: to write.
        path: of the file; its folder is made.
        samples: measurements behind the numbers, for readers; :func:`read_machine` ignores them.

    Raises:
        OSError: if the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"meshfold_machine": _VERSION, **asdict(machine), "samples": samples}, indent=1, default=list)
    path.write_text(text + "\n", encoding="utf-8")


def read_machine(path: str | Path) -> Machine:
    """Return the machine of a file.

    Raises:
        SpecError: if there is no such file, or it is not one of :func:`write_machine`, naming what to change.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(
            f"machine {str(path)!r}: {error.strerror}. meshfold calibrate --out {path} measures this machine and writes it"
        ) from error
    except ValueError as error:
        raise SpecError(f"machine {str(path)!r} is not JSON ({error}): {_again(path)}") from error
    if not isinstance(found, dict) or found.pop("meshfold_machine", None) != _VERSION:
        raise SpecError(f"machine {str(path)!r} has no 'meshfold_machine': {_VERSION}: {_again(path)}")
    found.pop("samples", None)
    where = f"machine {str(path)!r}"
    reached = _made(Efficiency, found.pop("efficiency", {}), f"{where}: efficiency")
    launches = _made(Launches, found.pop("launches", {}), f"{where}: launches")
    if "launch" in found:  # of files that have one number for all
        launches = Launches.of_all(_number("launch", found.pop("launch"), where))
    links = found.pop("collectives", {})
    if not isinstance(links, dict):
        raise SpecError(f"{where}: collectives={links!r} must map kinds to links: {_again(path)}")
    groups = found.pop("small_groups", {})
    if not isinstance(groups, dict) or not all(
        str(size).isdigit() and isinstance(of, dict) for size, of in groups.items()
    ):
        raise SpecError(f"{where}: small_groups={groups!r} must map numbers of ranks to links by kind: {_again(path)}")
    host = _made(Host, found.pop("host", {}), f"{where}: host")
    collectives = {kind: _made(Link, link, f"{where}: collectives: {kind}") for kind, link in links.items()}
    parts = {"host": host, "efficiency": reached, "launches": launches, "collectives": collectives}
    machine: Machine = _made(Machine, {**found, **parts}, where)
    few = {
        int(size): {kind: _made(Link, link, f"{where}: small_groups: {size}: {kind}") for kind, link in of.items()}
        for size, of in groups.items()
    }
    machine = replace(machine, small_groups=few)
    if machine.kind not in KINDS:
        raise SpecError(f"{where}: kind={machine.kind!r} must be {' or '.join(map(repr, KINDS))}: {_again(path)}")
    if not machine.flops:
        raise SpecError(f"{where}: flops is empty: {_again(path)}")
    return machine


def _again(path: str | Path) -> str:
    return f"write it with meshfold calibrate --out {path}"


def _made(kind: type[Any], values: Any, where: str) -> Any:
    """Return a dataclass made of JSON values, each checked."""
    if not isinstance(values, dict):
        raise SpecError(f"{where}={values!r} must be an object of JSON")
    known = {field.name: field for field in fields(kind)}
    for name in values:
        if name not in known:
            raise SpecError(f"{where}: unknown key {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}")
    for name, one in known.items():
        if name not in values and one.default is MISSING and one.default_factory is MISSING:
            raise SpecError(f"{where}: {name!r} is missing: measure again with meshfold calibrate")
    return kind(**{name: _checked(name, value, where) for name, value in values.items()})


def _checked(name: str, value: Any, where: str) -> Any:
    """Return a value with the types that the dataclass has; numbers must be above zero."""
    if isinstance(value, Host | Efficiency | Launches | Link) or (isinstance(value, str) and name in _WORDS):
        return value
    if name == "by_size" and isinstance(value, list):
        pairs = tuple((_number(name, a, where), _number(name, b, where)) for a, b in value)
        if list(pairs) != sorted(pairs) or sorted(b for _, b in pairs) != [b for _, b in pairs]:
            raise SpecError(f"{where}: by_size must have its pairs by rising bytes, and seconds that never fall")
        return pairs
    if name in _SIZES and isinstance(value, dict):
        tables = {
            one: tuple((_number(name, a, where), _number(name, b, where)) for a, b in value[one]) for one in value
        }
        if any(list(table) != sorted(table) for table in tables.values()):
            raise SpecError(f"{where}: {name} must have its pairs by rising {_SIZES[name]}")
        return tables
    if name in ("attention", "lag") and isinstance(value, dict) and value:
        return {int(size): _number(name, share, where) for size, share in value.items()}
    if isinstance(value, dict):
        return {
            key: one if isinstance(one, Link) else _number(f"{name}: {key}", one, where) for key, one in value.items()
        }
    return int(_number(name, value, where)) if name in ("devices", "cores") else _number(name, value, where)


def _number(name: str, value: Any, where: str) -> float:
    enough = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and (value > 0 or (name.partition(":")[0] in _MAY_BE_ZERO and not value < 0))
    )
    if not enough:
        raise SpecError(
            f"{where}: {name}={value!r} must be a number above 0: correct it, or measure again with meshfold calibrate"
        )
    return float(value)
