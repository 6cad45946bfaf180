"""Every example runs and prints what the table of ``examples/README.md`` says; the notebook shows what is committed."""

from __future__ import annotations

import ast
import re
import struct
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from docs import notebook
from docs.examples import FOLDER, TABLE, Example, examples, run, said
from docs.site.navigation import REFERENCE, public_names

from integration_tests.warm_python import WarmPython

EXAMPLES = examples(TABLE.read_text(encoding="utf-8"))
NOTEBOOK = FOLDER / "mesh_layouts_schedules.ipynb"
NUMBER = re.compile(r"\d+\.\d+")
each_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.script.stem)


def differences(printed: tuple[str, ...], promised: tuple[str, ...]) -> list[str]:
    """Lines that differ: in words, or in a number by more than two of its last digit, which the machine decides."""
    if len(printed) != len(promised):
        return [f"{len(printed)} lines, not {len(promised)}", *printed]
    return [
        f"{have!r}, not {want!r}"
        for have, want in zip(printed, promised, strict=True)
        if NUMBER.sub("", have) != NUMBER.sub("", want) or any(map(_far, NUMBER.findall(have), NUMBER.findall(want)))
    ]


def _far(have: str, want: str) -> bool:
    digits = len(want.partition(".")[2])
    return len(have.partition(".")[2]) != digits or abs(float(have) - float(want)) > 2.5 * 10**-digits


@pytest.mark.few(4)
@each_example
def test_an_example_prints_what_the_table_says(example: Example, warm: WarmPython, tmp_path: Path) -> None:
    printed = run(example.command, tmp_path, warm.environment())
    assert not differences(printed, example.prints), "python docs/examples.py writes the table anew"
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"examples", "tmp"}, "an example writes into temporary folders alone"


@each_example
def test_the_table_says_what_the_script_says(example: Example) -> None:
    assert (example.shows, example.command) == said(example.script)
    assert all((FOLDER / name).is_file() for name in re.findall(r"\]\(([^)]+)\)", example.files))


def test_two_numbers_may_differ_in_their_last_digit() -> None:
    assert differences(("loss 4.27, of 3",), ("loss 4.28, of 3",)) == []
    for other in ("loss 4.31, of 3", "loss 4.27, of 2", "loss 4.270, of 3", "bubble 4.27, of 3"):
        assert differences((other,), ("loss 4.27, of 3",))
    assert differences((), ("loss 4.27",))


def test_the_nodes_go_on_from_their_checkpoint(warm: WarmPython, tmp_path: Path) -> None:
    """Four steps on one rank are those of two nodes; a second start finds them done."""
    command = 'python examples/several_nodes.py "$TMPDIR"'
    again = run(f"{command}; {command}", tmp_path, warm.environment())
    [promised] = [example.prints for example in EXAMPLES if example.script.stem == "several_nodes"]
    losses = tuple(line for line in promised if line.startswith("step"))
    first, second = again[:7], again[7:]
    assert not differences(first[3:], losses)
    assert second == (*first[:3], "resuming from step 4")


def test_every_file_is_in_the_table_and_short() -> None:
    files = {path.name for path in FOLDER.iterdir() if path.suffix in (".py", ".sh", ".ipynb")}
    text = TABLE.read_text(encoding="utf-8")
    assert files == set(re.findall(r"\]\(([^)/]+)\)", text))
    for name in files - {NOTEBOOK.name}:
        assert len((FOLDER / name).read_text(encoding="utf-8").splitlines()) <= 60, name


def imported(code: str) -> Iterator[str]:
    """Every name that code imports from Meshfold, with its module."""
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names if alias.name.startswith("meshfold"))
            case ast.ImportFrom(module=str(module)) if module.startswith("meshfold"):
                yield from (f"{module}.{alias.name}" for alias in node.names)


def test_examples_import_public_names_alone() -> None:
    public = {f"meshfold.{package}.{name}" for package in REFERENCE for name in public_names(package)}
    cells = ("".join(cell["source"]) for cell in notebook.code_cells(notebook.read(NOTEBOOK)))
    for code in (*(path.read_text(encoding="utf-8") for path in FOLDER.glob("*.py")), *cells):
        assert set(imported(code)) <= public
    assert set(imported("import meshfold.mesh\nfrom meshfold.mesh.mesh import Mesh")) == {
        "meshfold.mesh",
        "meshfold.mesh.mesh.Mesh",
    }


def shown(output: dict[str, Any]) -> object:
    """What must be the same on every machine: text and SVG to the letter, of a PNG its size in pixels."""
    if "data" not in output:
        return output["text"]
    data = dict(output["data"])
    if "image/png" in data:
        png = b64decode(data["image/png"])
        assert png.startswith(b"\x89PNG")
        data["image/png"] = struct.unpack(">II", png[16:24])
    return data


def test_the_notebook_shows_what_it_would_show_now() -> None:
    committed = notebook.read(NOTEBOOK)
    now = notebook.run(committed, NOTEBOOK.name)
    then = [cell["outputs"] for cell in notebook.code_cells(committed)]
    assert [[shown(output) for output in outputs] for outputs in now] == [
        [shown(output) for output in outputs] for outputs in then
    ], "python docs/examples.py mesh_layouts_schedules.ipynb"
    assert "image/png" in then[0][0]["data"], "it opens with a picture"
    assert NOTEBOOK.stat().st_size < 500_000


def test_a_cell_shows_what_jupyter_shows() -> None:
    class Drawn:
        def _repr_svg_(self) -> str:
            return "<svg/>\n"

    def outputs(*sources: str) -> list[list[Any]]:
        cells = [dict(cell_type="code", source=[source]) for source in sources]
        return [
            [output.get("data", output.get("text")) for output in made] for made in notebook.run(dict(cells=cells), "a")
        ]

    assert outputs("x = 2\nprint(x)\nx + 1", "None", "x") == [
        [["2\n"], {"text/plain": ["3"]}],
        [],
        [{"text/plain": ["2"]}],
    ]
    with pytest.raises(ZeroDivisionError):
        outputs("1 / 0")
    kept = Drawn()
    assert notebook._shown(kept) == {"image/svg+xml": ["<svg/>\n"], "text/plain": ["<Drawn>"]}
