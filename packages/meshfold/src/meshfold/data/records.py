"""Text in records: JSON lines, Parquet and Arrow files, and folders that the library datasets saved.

A record is a document. Records that end with a newline are lines of one text (as in WikiText), without separators.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshfold.checkpoint.files import parse_json_object, read_json_lines
from meshfold.checkpoint.tensors import is_file_name
from meshfold.mesh import SpecError

LINES, TABLES = (".jsonl",), (".parquet", ".arrow")
_SAVED = ("dataset_dict.json", "state.json")
_TRAIN, _ASIDE = ("train",), ("validation", "valid", "dev", "test")
_AT_ONCE = 1 << 16  # records in memory at a time


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some of the records: those to train on, or those set aside; None if undecided.

    Attributes:
        files: their paths, by which a cache detects changes.
        aside: whether they are for validation.
        saved: a folder saved by datasets, which reads it.
    """

    files: tuple[Path, ...]
    aside: bool | None = None
    saved: Path | None = None


def find_records(source: Path) -> list[Part]:
    """Return the records at a path; none if it is anything else.

    Raises:
        SpecError: for a folder of several splits without one to train on.
    """
    if source.is_file():
        return [Part(files=(source,))] if source.suffix in LINES + TABLES else []
    if (source / _SAVED[0]).is_file():
        splits = _splits(source / _SAVED[0])
        parts = [_saved(source / name, name in _ASIDE) for name in splits if name in _TRAIN]
        if not parts:
            raise SpecError(
                f"{str(source)!r} has the splits {', '.join(splits)} and no 'train': give the folder of one of them"
            )
        return parts + [_saved(source / name, True) for name in _ASIDE if name in splits][:1]
    if (source / _SAVED[1]).is_file() and (source / "dataset_info.json").is_file():
        return [_saved(source, None)]
    files = sorted(path for path in source.iterdir() if path.is_file() and not path.name.startswith("."))
    known = [path for path in files if path.suffix in LINES + TABLES]
    if not known or any(path.suffix not in (*LINES, *TABLES, ".json", ".md", "") for path in files):
        return []
    aside = [path for path in known if path.name.startswith(_ASIDE)]
    train = [path for path in known if path not in aside]
    if not train:
        return [Part(files=tuple(known))]
    if not aside:
        return [Part(files=tuple(train))]
    first = next(name for name in _ASIDE if any(path.name.startswith(name) for path in aside))
    chosen = tuple(path for path in aside if path.name.startswith(first))
    return [Part(files=tuple(train), aside=False), Part(files=chosen, aside=True)]


def _splits(path: Path) -> list[str]:
    """Return the splits that a folder of the ``datasets`` library lists; each is a subfolder."""
    try:
        splits = parse_json_object(path.read_bytes()).get("splits")
    except (OSError, ValueError) as error:
        raise SpecError(f"{str(path)!r} cannot be read: {error}") from error
    if not isinstance(splits, list) or not all(map(is_file_name, splits)):
        raise SpecError(f"{str(path)!r} lists no splits: it is damaged")
    return splits


def _saved(folder: Path, aside: bool | None) -> Part:
    return Part(files=tuple(sorted(folder.glob("*.arrow"))), aside=aside, saved=folder)


def texts_of(part: Part, column: str | None) -> Iterator[str]:
    """Yield the text of each record.

    Args:
        column: the field that holds it; by default ``text``, or the only one of strings.

    Raises:
        SpecError: if there is no such field, or a file cannot be read.
    """
    if part.saved is not None:
        yield from _of_table(part.saved, _load(part.saved, saved=True), column)
        return
    for path in part.files:
        try:
            if path.suffix in LINES:
                yield from _of_lines(path, column)
            else:
                yield from _of_table(path, _load(path, saved=False), column)
        except (SpecError, GeneratorExit):
            raise
        except Exception as error:  # Arrow's own kinds, for a damaged file
            reason = str(error).strip().partition("\n")[0]
            raise SpecError(f"{str(path)!r} cannot be read: {reason}") from error


def _of_lines(path: Path, column: str | None) -> Iterator[str]:
    name = column
    for number, record in read_json_lines(path):
        if name is None:
            name = _column(path, [key for key, value in record.items() if isinstance(value, str)], None)
        if not isinstance(record.get(name), str):
            raise SpecError(
                f"{str(path)!r}, line {number}: has no text under {name!r}, but {', '.join(record)}; say which field with "
                "--text-column"
            )
        yield record[name]


def _load(path: Path, *, saved: bool) -> Any:
    try:
        import datasets
    except ImportError:
        raise SpecError(f"{str(path)!r} needs the library datasets: pip install meshfold[datasets]") from None
    try:
        if saved:
            return datasets.load_from_disk(str(path))
        if path.suffix == ".arrow":
            return datasets.Dataset.from_file(str(path))
        import pyarrow.parquet

        return pyarrow.parquet.ParquetFile(path)
    except Exception as error:  # Arrow's own kinds
        reason = str(error).strip().partition("\n")[0]
        raise SpecError(f"{str(path)!r} cannot be read: {reason}") from error


def _of_table(path: Path, table: Any, column: str | None) -> Iterator[str]:
    if hasattr(table, "iter_batches"):
        schema = table.schema_arrow
        strings = [field.name for field in schema if str(field.type) in ("string", "large_string", "string_view")]
        name = _column(path, strings, column)
        for batch in table.iter_batches(_AT_ONCE, columns=[name]):
            yield from (value or "" for value in batch.column(0).to_pylist())
        return
    strings = [key for key, kind in table.features.items() if getattr(kind, "dtype", "") in ("string", "large_string")]
    name = _column(path, strings, column)
    for start in range(0, len(table), _AT_ONCE):
        yield from (value or "" for value in table[start : start + _AT_ONCE][name])


def _column(path: Path, strings: list[str], asked: str | None) -> str:
    """Return the column with the text."""
    if asked is not None and asked in strings:
        return asked
    if asked is None and ("text" in strings or len(strings) == 1):
        return "text" if "text" in strings else strings[0]
    has = f"its fields of text are {', '.join(strings)}" if strings else "it has no field of text"
    what = f"has no text under {asked!r}" if asked is not None else "has no field called 'text'"
    raise SpecError(f"{str(path)!r} {what}: {has}; say which with --text-column")
