"""Notebooks as plain Python: their cells run in one namespace, without Jupyter, and what they show is written into the file.

A cell shows what it prints, then its last expression: as the picture that this draws of itself, else as text.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
from pathlib import Path
from typing import Any

Cell = dict[str, Any]
"""A cell or an output, as the file has it."""


def read(path: Path) -> dict[str, Any]:
    """The notebook."""
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return notebook


def code_cells(notebook: dict[str, Any]) -> list[Cell]:
    """Its cells of code, in order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(notebook: dict[str, Any], name: str) -> list[list[Cell]]:
    """Run the code in this process, in one go: the outputs of each cell of code."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    return [
        _run_cell("".join(cell["source"]), f"{name}, cell {number}", number, namespace)
        for number, cell in enumerate(code_cells(notebook), 1)
    ]


def _run_cell(code: str, name: str, number: int, namespace: dict[str, Any]) -> list[Cell]:
    tree = ast.parse(code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    value = None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, name, "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    outputs: list[Cell] = []
    if printed.getvalue():
        outputs.append(dict(output_type="stream", name="stdout", text=_lines(printed.getvalue())))
    if value is not None:
        outputs.append(dict(output_type="execute_result", execution_count=number, metadata={}, data=_shown(value)))
    return outputs


def _shown(value: Any) -> dict[str, Any]:
    """What stands for a value, by its kind; beside a picture its class is text enough."""
    picture: dict[str, Any] = {}
    if hasattr(value, "_repr_svg_"):
        picture["image/svg+xml"] = _lines(value._repr_svg_())
    elif hasattr(value, "_repr_png_"):
        picture["image/png"] = base64.b64encode(value._repr_png_()).decode() + "\n"
    return {**picture, "text/plain": [f"<{type(value).__name__}>" if picture else repr(value)]}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def refresh(path: Path) -> None:
    """Write into a notebook what its cells show now."""
    notebook = read(path)
    for number, (cell, outputs) in enumerate(zip(code_cells(notebook), run(notebook, path.name), strict=True), 1):
        cell.update(execution_count=number, outputs=outputs)
    text = json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
