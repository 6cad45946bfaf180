"""Translation of another library's arguments: a table for each function, and one way to read them all."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshfold.mesh import SpecError, did_you_mean


class MigrationNote(UserWarning):
    """An argument of another library that was accepted and does nothing here."""


@dataclass(frozen=True, kw_only=True)
class Argument:
    """Translation of one argument. Exactly one of ``to``, ``word`` and ``instead`` is given.

    Attributes:
        default: its default.
        to: the setting that it becomes, a path such as ``"zero.placement"``; the first part is one of :data:`ROOTS`.
        by: computes the setting's value from the argument's; None sets nothing.
        always: also set it from its default, since ours differs.
        word: why it does nothing, reported for a value other than the default.
        instead: refuses a value other than the default; what to do instead.
    """

    default: Any = None
    to: str = ""
    by: Callable[[Any], Any] | None = None
    always: bool = False
    word: str = ""
    instead: str = ""


Table = Mapping[str, Argument]

ROOTS = ("data", "tensor", "pipeline", "sequence", "zero", "scale", "engine", "aside")
"""Entries of the spec; settings of the loss scale; arguments of ``Engine``; what the caller looks after."""


@dataclass(kw_only=True)
class Translation:
    """Translated settings by path, and messages about arguments without effect."""

    settings: dict[str, Any] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)

    def under(self, root: str) -> dict[str, Any]:
        """Return the settings whose paths begin so: ``{"placement": "cpu"}`` under ``"zero"``."""
        return {
            path.removeprefix(f"{root}."): value for path, value in self.settings.items() if path.startswith(f"{root}.")
        }

    def add(self, other: Translation) -> None:
        """Add another one's settings, which override, and its messages."""
        self.settings.update(other.settings)
        self.words += other.words

    def say(self, what: str, *, rank: int = 0) -> None:
        """Warn once about all arguments without effect, on the first rank."""
        if self.words and rank == 0:
            warnings.warn(f"{what}: " + "; ".join(self.words), MigrationNote, stacklevel=4)


def translate(where: str, given: Mapping[str, Any], table: Table) -> Translation:
    """Look arguments up.

    Args:
        where: their function, for messages: ``"GeminiPlugin"``.
        given: by name.
        table: of that function.

    Raises:
        SpecError: for a name that is not in the table, and for an unsupported value.
    """
    check_names(where, given, table)
    found = Translation()
    for name, argument in table.items():
        value = given.get(name, argument.default)
        changed = name in given and not _same(value, argument.default)
        if argument.instead and changed:
            raise SpecError(f"{where}: {name}={value!r}: {argument.instead}")
        if argument.word and changed:
            found.words.append(f"{name}={value!r} does nothing: {argument.word}")
        if argument.to and (changed or argument.always):
            try:
                made = value if argument.by is None else argument.by(value)
            except ValueError as error:
                raise SpecError(f"{where}: {name}={value!r}: {error}") from error
            if made is not None:
                found.settings[argument.to] = made
    return found


def check_names(where: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Check names of arguments.

    Raises:
        SpecError: for the first unknown name, with the most similar one.
    """
    names = list(known)
    for name in given:
        if name not in names:
            hint = did_you_mean(str(name), names) or f" Known: {', '.join(names)}"
            raise SpecError(f"{where}: there is no {name!r}.{hint}")


def bind(where: str, table: Table, args: Sequence[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments by name, including those that were passed by position.

    Raises:
        SpecError: for too many, or one that is passed twice.
    """
    names = list(table)
    if len(args) > len(names):
        raise SpecError(f"{where}: takes {len(names)} arguments, and {len(args)} were given")
    by_place = dict(zip(names, args, strict=False))
    for name in by_place:
        if name in given:
            raise SpecError(f"{where}: {name} is given twice, by position and by name")
    return {**by_place, **given}


def one_of(known: Mapping[Any, Any]) -> Callable[[Any], Any]:
    """Return a setting from a table of values."""

    def by(value: Any) -> Any:
        name = getattr(value, "name", value)  # Colossal-AI passes enums
        if name not in known:
            words = [str(key) for key in known]
            if str(name) in words:
                raise ValueError(f"write {name} without quotes")
            raise ValueError(f"it is one of {', '.join(words)}.{did_you_mean(str(name), words)}")
        return known[name]

    return by


def unless_zero(value: Any) -> Any:
    """Return the value, or None for 0, which means no clipping there."""
    return None if _same(value, 0.0) else value


def _same(value: Any, default: Any) -> bool:
    """Return True if a value is the default; True differs from 1 here, and 1 equals 1.0."""
    if value is default:
        return True
    kinds = {type(value), type(default)}
    return (len(kinds) == 1 or kinds == {int, float}) and bool(value == default)
