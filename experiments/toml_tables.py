"""Loader for TOML files whose tables are rows of one dataclass: claims of experiments, bars of benchmarks."""

from __future__ import annotations

import tomllib
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

Row = TypeVar("Row")
ROOT = Path(__file__).resolve().parents[1]


class TableError(ValueError):
    """A TOML file that does not fit its schema. The message names the file and the key, and says what to change."""


def read_tables(path: Path, row: type[Row]) -> dict[str, Row]:
    """Read every table of a file as one ``row``, by name and in the file's order.

    Args:
        path: the TOML file.
        row: a dataclass. Its fields are the keys; those without a default are required. Supported types: str, int,
            float (an integer is accepted), bool and ``tuple[str, ...]``.

    Raises:
        TableError: for a missing file, invalid TOML, a key outside a table, an unknown or missing key, a wrong type.
    """
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TableError(f"{shown} does not exist: restore it from the repository") from None
    except tomllib.TOMLDecodeError as error:
        raise TableError(f"{shown} is not valid TOML: {error}") from None
    return {name: _row(f"{shown}, [{name}]", name, values, row) for name, values in tables.items()}


def check_names(path: Path, found: set[str], wanted: set[str]) -> None:
    """Check that a file has a table for each name in ``wanted``, and no other.

    Raises:
        TableError: if it has not.
    """
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    for name in sorted(wanted - found):
        raise TableError(f"{shown} has no table [{name}]: add it, or remove {name!r} from the code beside the file")
    for name in sorted(found - wanted):
        raise TableError(
            f"{shown}: no code computes [{name}]: remove the table, or rename it to one of {_list(wanted)}"
        )


def _row(where: str, name: str, values: Any, row: type[Row]) -> Row:
    if not isinstance(values, dict):
        raise TableError(f"{where} is a value: put {name!r} into a table, under a line [table]")
    known: dict[str, Field[Any]] = {one.name: one for one in fields(row)}  # type: ignore[arg-type]
    types = get_type_hints(row)
    for key in values:
        if key not in known:
            raise TableError(f"{where}: unknown key {key!r}: remove it, or use one of {_list(known)}")
    for key, one in known.items():
        if key not in values and one.default is MISSING and one.default_factory is MISSING:
            raise TableError(f"{where}: the key {key!r} is missing: add {key} = ({_described(types[key])})")
    return row(**{key: _value(f"{where}, {key}", value, types[key]) for key, value in values.items()})


def _value(where: str, value: Any, wanted: Any) -> Any:
    if get_origin(wanted) is tuple:
        if isinstance(value, list) and all(isinstance(one, get_args(wanted)[0]) for one in value):
            return tuple(value)
    elif wanted is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    elif type(value) is wanted:
        return value
    raise TableError(f"{where} = {value!r}: write {_described(wanted)}")


def _described(wanted: Any) -> str:
    words = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}
    return words.get(wanted, "a list of strings")


def _list(names: Any) -> str:
    return ", ".join(sorted(names))
