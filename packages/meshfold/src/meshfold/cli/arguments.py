"""Arguments that several commands share: model, spec, sizes; and :class:`Failure`, which commands raise.

``--parallel`` takes a spec in four forms:

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
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any


class Failure(Exception):
    """An error of a command: a sentence for the user, and the exit code."""

    def __init__(self, sentence: str, code: int = 2) -> None:
        super().__init__(sentence)
        self.code = code


def sentence_of(error: Exception) -> Failure | None:
    """Return an intended or system error as a sentence, or None for a bug."""
    if isinstance(error, Failure):
        return error
    errors = sys.modules.get("meshfold.mesh.errors")  # do not import torch for this
    if errors is not None and isinstance(error, errors.MeshfoldError):
        return Failure(str(error), 1)
    if isinstance(error, OSError) and error.strerror and (error.filename or _advice_on(error)):
        return Failure(reason_of(error), 1)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        advice = "use a smaller --batch-size or --seq-len, --accumulate more, or split the model over more ranks"
        return Failure(f"the GPU's memory is full: {advice}", 1)
    return None


def reason_of(error: OSError) -> str:
    """Return an error of the system as ``file: reason; advice``, each where it is known."""
    return ": ".join(str(part) for part in (error.filename, error.strerror, _advice_on(error)) if part)


def _advice_on(error: OSError) -> str | None:
    files = sys.modules.get("meshfold.checkpoint.errors")  # do not import torch for this
    return None if files is None else files.advice_on(error)


def add_model(parser: argparse._ActionsContainer) -> None:
    """Add ``--model``, ``--hf``, ``--set`` and ``--rule``."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--model",
        metavar="NAME",
        help="a preset: gpt-tiny, llama-small, gpt2, palm-8b, ... (default: gpt-tiny), or a folder as for --hf",
    )
    which.add_argument(
        "--hf",
        metavar="FOLDER",
        help="a local folder of a Hugging Face causal LM: config.json, with weights or without",
    )
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        dest="changes",
        help="change the preset: layers=4 hidden=128 heads=4",
    )
    parser.add_argument(
        "--rule",
        action="append",
        default=[],
        metavar="PATTERN=ROLE",
        dest="rules",
        help="tensor-parallel role of the submodules that match, such as '*.self_attn=replicate'; can be repeated",
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """Return advice on a name of the command line that does not exist, " Did you mean 'x'?"; empty if none is alike.

    Case, dashes at the beginning, and whether a name has dashes or underscores do not count.
    """
    import difflib

    def bare(word: str) -> str:
        return word.lstrip("-").replace("_", "-").casefold()

    names = {bare(word): word for word in known}
    found = difflib.get_close_matches(bare(name), list(names), n=1)
    return f" Did you mean {names[found[0]]!r}?" if found else ""


def read_model(arguments: argparse.Namespace) -> None:
    """Treat ``--model FOLDER`` as ``--hf FOLDER`` if the value has a separator or is a folder with a config.json."""
    name = getattr(arguments, "model", None)
    if name is not None and (os.sep in name or os.path.isfile(os.path.join(name, "config.json"))):
        arguments.model, arguments.hf = None, name


def read_changes(words: list[str]) -> dict[str, Any]:
    """Return the dict of ``--set``.

    Raises:
        Failure: for a word that is not ``key=value``.
    """
    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not (equals and key and value):
            raise Failure(f"--set {word!r}: write key=value, such as --set layers=4 hidden=128")
        try:
            found[key] = ast.literal_eval(value.capitalize() if value in ("true", "false", "none") else value)
        except (SyntaxError, ValueError):
            raise Failure(
                f"--set {word!r}: {value!r} is neither a number nor true or false; write --set {key}=4, say"
            ) from None
    return found


def read_rules(words: list[str]) -> dict[str, str]:
    """Return the rules of ``--rule``, role by pattern, without checking that the model has such submodules.

    Raises:
        Failure: for a word that is not ``pattern=role``, an unknown role, and a pattern with two roles.
    """
    if not words:
        return {}
    from meshfold.mesh import did_you_mean
    from meshfold.tensor_parallel.convert import ROLES

    found: dict[str, str] = {}
    for word in words:
        pattern, equals, role = (part.strip() for part in word.rpartition("="))
        if not (equals and pattern and role):
            raise Failure(f"--rule {word!r}: write pattern=role, such as --rule '*.self_attn=replicate'")
        if role not in ROLES:
            raise Failure(
                f"--rule {word!r}: {role!r} is not a role.{did_you_mean(role, ROLES)} Roles are {', '.join(ROLES)}"
            )
        if found.get(pattern, role) != role:
            raise Failure(f"--rule {word!r}: another rule says that {pattern!r} is {found[pattern]!r}")
        found[pattern] = role
    return found


def byte_size(text: str) -> int:
    """Parse an amount of memory, in bytes."""
    from meshfold.mesh.spec import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        number = re.match(r"\d+(?:\.\d+)?", text)
        raise argparse.ArgumentTypeError(
            f"{text!r} {str(error).removesuffix('.')}: write {number[0] if number else 24}GiB, 5GB or another amount of memory"
        ) from None


PICTURES = (".svg", ".png", ".pdf")
"""Endings of pictures that commands draw."""


def check_file(option: str, path: str | None, endings: Sequence[str] = ()) -> None:
    """Check that a file can be written, before the work whose result it gets.

    Args:
        option: the option that names it, for the error.
        path: None for no file.
        endings: one of them its name must have; none: any.

    Raises:
        Failure: if it is a folder, if its folder is missing or cannot be written to, or for another ending.
    """
    if path is None:
        return
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path):
        raise Failure(f"{option} {path!r} is a folder; give a file in it, such as {os.path.join(path, 'plan.svg')}")
    if not os.path.isdir(folder):
        raise Failure(
            f"{option} {path!r}: there is no folder {folder!r}; make it (mkdir -p {folder}), or give another path"
        )
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise Failure(f"{option} {path!r} cannot be written; give another path")
    if endings and not path.lower().endswith(tuple(endings)):
        raise Failure(f"{option} {path!r}: a picture is drawn as {', '.join(endings)}; give a name that ends so")


def rate(text: str) -> float:
    """Parse a number from 0 up."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 up, such as 0.1 or 3e-4")
    return number


def learning_rate(text: str) -> float:
    """Parse a number above 0: with a learning rate of 0 no weight would change."""
    if not (number := rate(text)):
        raise argparse.ArgumentTypeError(f"{text!r} changes no weight; give a number above 0, such as 3e-4")
    return number


def whole(text: str) -> int:
    """Parse a whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _whole_from(least: int) -> Callable[[str], int]:
    """Return a parser of whole numbers that are at least ``least``."""

    def parse(text: str) -> int:
        number = whole(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"{text} is not a whole number from {least} up")
        return number

    return parse


natural, positive, several = map(_whole_from, range(3))


_WAYS = 'write --parallel "dict(data=2, tensor=4)", --parallel data=2 tensor.mode=2d tensor.size=4, or a .py file'
_ITEM = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)=([^=]+)")


def add_parallel(parser: argparse._ActionsContainer) -> None:
    """Add the argument ``--parallel``."""
    parser.add_argument(
        "--parallel",
        nargs="+",
        default=["dict()"],
        metavar="SPEC",
        help="how to split the work: \"dict(data=2, tensor=dict(mode='2d', size=4))\", or data=2 tensor.mode=2d "
        "tensor.size=4, or a Python file with parallel = dict(...) (default: one rank)",
    )


def read_parallel(words: list[str]) -> dict[str, Any]:
    """Return the dict of the words of ``--parallel``, without checking the spec.

    Raises:
        Failure: for text in none of the four forms.
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


AUTO = {"auto": True}
"""The spec of ``--parallel auto``, until one is chosen."""


def read_parallel_or_auto(words: list[str]) -> dict[str, Any]:
    """Return the dict of the words of ``--parallel``; :data:`AUTO` for ``auto``."""
    return dict(AUTO) if words == ["auto"] else read_parallel(words)


def _from_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise Failure(f"--parallel {str(path)!r}: there is no such file")
    try:
        names = runpy.run_path(str(path))
    except Exception as error:
        raise Failure(f"--parallel {str(path)!r}: running it raised {type(error).__name__}: {error}") from error
    if not isinstance(names.get("parallel"), dict):
        raise Failure(f"--parallel {str(path)!r}: the file must define parallel = dict(...)")
    found: dict[str, Any] = names["parallel"]
    return found


def _literal(node: ast.expr) -> Any:
    """Evaluate an expression of literals and ``dict(key=...)``; raise ValueError for anything else."""
    if isinstance(node, ast.Dict) and None not in node.keys:
        pairs = [
            (ast.literal_eval(key), _literal(value)) for key, value in zip(node.keys, node.values, strict=True) if key
        ]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
        pairs = [(word.arg, _literal(word.value)) for word in node.keywords]
        if None in dict(pairs):
            raise ValueError("dict(**...)")
    else:
        return ast.literal_eval(node)
    if len(dict(pairs)) < len(pairs):
        raise Failure(f"--parallel {ast.unparse(node)!r} says a key twice")
    return dict(pairs)


def _word(text: str) -> Any:
    """Parse a word: int ``4``, grid ``2x4``, bool ``true``, else a string such as ``2d``."""
    if re.fullmatch(r"\d+(x\d+)+", text):
        return tuple(int(size) for size in text.split("x"))
    try:
        return ast.literal_eval(text.capitalize() if text in ("true", "false", "none") else text)
    except (SyntaxError, ValueError):
        return text
