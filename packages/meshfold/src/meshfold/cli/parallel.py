"""``--parallel``: a spec as it is typed in a shell.

================================================ =======================================
``dict(data=2, tensor=dict(mode="2d", size=4))`` as in Python
``data=2, tensor=dict(mode="2d", size=4)``       without the outer dict
``data=2 tensor.mode=2d tensor.size=4``          without quotes and brackets
``spec.py``                                      a Python file with ``parallel = dict(...)``
================================================ =======================================
"""

from __future__ import annotations

import argparse
import ast
import re
import runpy
from pathlib import Path
from typing import Any

from meshfold.cli.failure import Failure

_WAYS = (
    'write --parallel "dict(data=2, tensor=4)", --parallel data=2 tensor.mode=2d tensor.size=4, or a .py file'
)
_ITEM = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)=([^=]+)")


def add_parallel(parser: argparse._ActionsContainer) -> None:
    """The argument ``--parallel``."""
    parser.add_argument(
        "--parallel",
        nargs="+",
        default=["dict()"],
        metavar="SPEC",
        help="how to split the work: \"dict(data=2, tensor=dict(mode='2d', size=4))\", or data=2 tensor.mode=2d "
        "tensor.size=4, or a Python file with parallel = dict(...) (default: one rank)",
    )


def read_parallel(words: list[str]) -> dict[str, Any]:
    """The dict that the words of ``--parallel`` stand for; whether it is a good spec is not looked at.

    Raises:
        Failure: for text that is none of the four forms.
    """
    text = " ".join(words).strip()
    if text.endswith(".py"):
        return _from_file(Path(text))
    for source in (text, f"dict({text})", f"dict({','.join(words)})"):
        try:
            value = _literal(ast.parse(source, mode="eval").body)
        except (SyntaxError, ValueError):
            continue
        if isinstance(value, dict):
            return value
    if "(" in text or "{" in text:
        closed = all(text.count(a) == text.count(b) for a, b in ("()", "{}", "[]"))
        why = "names within brackets need quotes, as in mode='2d'" if closed else "its brackets do not match"
        raise Failure(f"--parallel {text!r} is not a spec: {why}; {_WAYS}")
    found: dict[str, Any] = {}
    for word in re.split(r"[\s,]+", text):
        item = _ITEM.fullmatch(word)
        if item is None:
            raise Failure(f"--parallel {text!r} is not a spec: {_WAYS}")
        *path, last = item[1].split(".")
        inner = found
        for key in path:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise Failure(f"--parallel {text!r}: {key!r} is both a value and a group of values")
        if last in inner:
            raise Failure(f"--parallel {text!r} says {item[1]!r} twice")
        inner[last] = _word(item[2])
    return found


def _from_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise Failure(f"--parallel {str(path)!r}: there is no such file")
    try:
        names = runpy.run_path(str(path))
    except Exception as error:
        raise Failure(
            f"--parallel {str(path)!r}: running it raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(names.get("parallel"), dict):
        raise Failure(f"--parallel {str(path)!r}: the file must say parallel = dict(...)")
    found: dict[str, Any] = names["parallel"]
    return found


def _literal(node: ast.expr) -> Any:
    """The value of an expression made of literals and ``dict(key=...)`` alone; ValueError for any other."""
    if isinstance(node, ast.Dict) and None not in node.keys:
        pairs = [
            (ast.literal_eval(key), _literal(value))
            for key, value in zip(node.keys, node.values, strict=True)
            if key
        ]
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "dict"
        and not node.args
    ):
        pairs = [(word.arg, _literal(word.value)) for word in node.keywords]
        if None in dict(pairs):
            raise ValueError("dict(**...)")
    else:
        return ast.literal_eval(node)
    if len(dict(pairs)) < len(pairs):
        raise Failure(f"--parallel {ast.unparse(node)!r} says a key twice")
    return dict(pairs)


def _word(text: str) -> Any:
    """``4`` is an int, ``2x4`` a grid, ``true`` a bool; whatever is nothing of this kind is a string: ``2d``."""
    if re.fullmatch(r"\d+(x\d+)+", text):
        return tuple(int(size) for size in text.split("x"))
    try:
        return ast.literal_eval(text.capitalize() if text in ("true", "false", "none") else text)
    except (SyntaxError, ValueError):
        return text
