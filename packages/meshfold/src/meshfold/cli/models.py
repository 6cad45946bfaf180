"""Arguments that say which model and which spec; shared by the commands that need one."""

from __future__ import annotations

import argparse
import ast
import os
from typing import Any

from meshfold.cli.failure import Failure


def add_model(parser: argparse._ActionsContainer) -> None:
    """``--model``, ``--hf``, ``--set`` and ``--rule``."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--model",
        metavar="NAME",
        help="a preset: gpt-tiny, llama-small, gpt2, ... (default: gpt-tiny), or a folder as for --hf",
    )
    which.add_argument(
        "--hf",
        metavar="FOLDER",
        help="a local folder of a Hugging Face causal LM: config.json, and weights or none",
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", dest="changes",
        help="change the preset: layers=4 hidden=128 heads=4",
    )  # fmt: skip
    parser.add_argument(
        "--rule", action="append", default=[], metavar="PATTERN=ROLE", dest="rules",
        help="role of matching submodules in tensor parallelism, once for each: '*.self_attn=replicate'",
    )  # fmt: skip


def read_model(arguments: argparse.Namespace) -> None:
    """Let ``--model FOLDER`` be ``--hf FOLDER``: what has a separator in it, or a configuration, is no name of ours."""
    name = getattr(arguments, "model", None)
    if name is not None and (os.sep in name or os.path.isfile(os.path.join(name, "config.json"))):
        arguments.model, arguments.hf = None, name


def read_changes(words: list[str]) -> dict[str, Any]:
    """The dict that ``--set`` stands for.

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
            raise Failure(f"--set {word!r}: {value!r} is neither a number nor true or false") from None
    return found


def read_rules(words: list[str]) -> dict[str, str]:
    """The rules, role by pattern, that ``--rule`` stands for; whether the model has such submodules is not looked at.

    Raises:
        Failure: for a word that is not ``pattern=role``, a role that there is not, and a pattern with two roles.
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


def positive(text: str) -> int:
    """An argument that is a whole number from 1 up."""
    number = whole(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 up")
    return number


def byte_size(text: str) -> int:
    """An argument that is an amount of memory, in bytes."""
    from meshfold.mesh.spec import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} {str(error).removesuffix('.')}: write 24GiB, 5GB or another amount of memory"
        ) from None


def several(text: str) -> int:
    """An argument that is a whole number from 2 up."""
    number = whole(text)
    if number < 2:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 2 up")
    return number


def natural(text: str) -> int:
    """An argument that is a whole number from 0 up."""
    number = whole(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 0 up")
    return number


def rate(text: str) -> float:
    """An argument that is a number from 0 up."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 up")
    return number


def whole(text: str) -> int:
    """An argument that is a whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
