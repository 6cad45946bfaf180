"""Loader of claims and bars: what it accepts, and the errors for what it does not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from experiments.toml_tables import TableError, check_names, read_tables


@dataclass(frozen=True, kw_only=True)
class Row:
    claim: str
    least: float
    than: tuple[str, ...] = ()
    relative: bool = False


def read(folder: Path, text: str) -> dict[str, Row]:
    path = folder / "claims.toml"
    path.write_text(text)
    return read_tables(path, Row)


def test_tables_are_rows_in_the_order_of_the_file(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        '[b]\nclaim = "x"\nleast = 2\n[a]\nclaim = "y"\nleast = 1.5\nthan = ["z"]\nrelative = true\n',
    )
    assert list(found.items()) == [
        ("b", Row(claim="x", least=2.0)),
        ("a", Row(claim="y", least=1.5, than=("z",), relative=True)),
    ]
    check_names(tmp_path / "claims.toml", set(found), {"a", "b"})


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('[a]\nclaim = "x"\n', r"claims.toml, \[a\]: the key 'least' is missing: add least = \(a number\)"),
        (
            '[a]\nclaim = "x"\nleats = 1\n',
            r"\[a\]: unknown key 'leats': remove it, or use one of claim, least, ",
        ),
        ("[a]\nclaim = 1\nleast = 1\n", r"\[a\], claim = 1: write a string"),
        ('[a]\nclaim = "x"\nleast = true\n', r"\[a\], least = True: write a number"),
        ('[a]\nclaim = "x"\nleast = 1\nthan = "z"\n', r"\[a\], than = 'z': write a list of strings"),
        ('claim = "x"\n', r"\[claim\] is a value: put 'claim' into a table"),
        ("[a\n", r"claims.toml is not valid TOML: .*line 1"),
    ],
)
def test_an_error_names_the_file_the_key_and_the_remedy(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(TableError, match=error):
        read(tmp_path, text)


def test_tables_and_code_have_the_same_names(tmp_path: Path) -> None:
    path = tmp_path / "claims.toml"
    with pytest.raises(TableError, match=r"has no table \[b\]: add it"):
        check_names(path, {"a"}, {"a", "b"})
    with pytest.raises(TableError, match=r"no code computes \[b\]: remove the table"):
        check_names(path, {"a", "b"}, {"a"})
    with pytest.raises(TableError, match="does not exist"):
        read_tables(path, Row)
