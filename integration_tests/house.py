"""What the house tests know about the workspace: its packages, what they may import, and their metadata."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

_GROUND = {"mesh", "kernels"}
_PARALLEL = {*_GROUND, "tensor_parallel", "zero_gemini", "pipeline", "checkpoint"}
_INTEGRATION = {*_PARALLEL, "engine"}
# The import rule: which siblings a package may import.
SIBLINGS: dict[str, set[str]] = {
    "mesh": set(),
    "kernels": set(),
    "tensor_parallel": _GROUND,
    "zero_gemini": _GROUND,
    "pipeline": _GROUND,
    "checkpoint": {"mesh"},
    "models": {*_GROUND, "tensor_parallel"},
    "engine": _PARALLEL,
    "planner": _INTEGRATION,
    "huggingface": {*_INTEGRATION, "models"},
    "lightning": _INTEGRATION,
    "colossalai": _INTEGRATION,
    "meshfold": {*_INTEGRATION, "models", "planner", "huggingface"},
}
# Words that no docstring opens with.
QUESTIONS = ("How", "Of", "What", "Where", "Whether", "Which", "Who", "Whom", "Whose")
# Words that no identifier is or contains, and what to write instead (docs/glossary.md has the terms).
BANNED = {
    "connected": "what connects it: wrapped, registered",
    "dear": "expensive",
    "foretell": "predict",
    "foretold": "predicted",
    "ghosts": "absent_parameters",
    "handed_over": "what was passed on, and to whom",
    "held_model": "chunked_parameters, or what holds the model",
    "known_of": "parameter_facts",
    "on_trial": "speculative",
    "pass_through": "stream_on_gpu",
    "politely": "what it avoids: without_raising, if_possible",
    "rehome": "move",
    "residence": "placement",
    "staying": "gather_cache",
    "talk": "exchange, messages",
    "tape": "init_trace",
    "told_to_all": "broadcast",
    "true_dtype": "master_dtype",
    "true_weight": "master_weight",
    "true_weights": "master_weights",
    "untouched": "what it is: unused, unchanged",
    "whereabouts": "rank_status, location",
}
APPLICATION = "meshfold"
"""The package that stands above all others, and has no module of its own name."""


@dataclass(frozen=True)
class Package:
    """A folder under packages/: one distribution."""

    name: str

    @property
    def folder(self) -> Path:
        """The folder that holds pyproject.toml."""
        return ROOT / "packages" / self.name

    @property
    def sources(self) -> list[Path]:
        """The folders that hold the modules: one for each name under ``meshfold`` that the distribution brings."""
        folder = self.folder / "src" / "meshfold"
        return sorted(path for path in folder.iterdir() if path.is_dir() and path.name != "__pycache__")

    @property
    def modules(self) -> list[Path]:
        """Every Python file of the package, tests left out."""
        return sorted(path for source in self.sources for path in source.rglob("*.py"))

    @cached_property
    def project(self) -> dict[str, Any]:
        """The table [project] of pyproject.toml."""
        table: dict[str, Any] = tomllib.loads((self.folder / "pyproject.toml").read_text())["project"]
        return table

    @property
    def distribution(self) -> str:
        """What `pip install` calls it."""
        return str(self.project["name"])

    @property
    def required(self) -> set[str]:
        """The distributions that it always needs."""
        return {bare(requirement) for requirement in self.project["dependencies"]}

    @property
    def optional(self) -> set[str]:
        """The distributions that its extras add."""
        extras = self.project.get("optional-dependencies", {})
        return {bare(requirement) for extra in extras.values() for requirement in extra}

    @cached_property
    def public(self) -> dict[str, set[str]]:
        """The public folders: dotted name to the names in ``__all__``."""
        found: dict[str, set[str]] = {}
        for path in self.modules:
            if path.name == "__init__.py" and (names := names_in_all(path.read_text())):
                found[".".join(path.parent.relative_to(self.folder / "src").parts)] = names
        return found


def names_in_all(source: str) -> set[str]:
    """Return the names that a module's ``__all__`` lists, as text."""
    found: set[str] = set()
    for node in ast.parse(source).body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id="__all__")], value=value)
                | ast.AugAssign(target=ast.Name(id="__all__"), value=value)
            ):
                found |= set(ast.literal_eval(value))
    return found


def bare(requirement: str) -> str:
    """The normalised name in a requirement: ``"Foo_Bar[x]>=1"`` is ``"foo-bar"``."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    if name is None:
        raise ValueError(f"{requirement!r} is not a requirement")
    return re.sub(r"[-_.]+", "-", name[0]).lower()


PACKAGES = [Package(name) for name in SIBLINGS]
# Which package brings a name under ``meshfold``.
OWNERS = {source.name: package.name for package in PACKAGES for source in package.sources}
DISTRIBUTIONS = {package.distribution: package for package in PACKAGES}


def imports(source: str, module: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield every dotted name that a module's source imports, wherever it does so, with its line.

    ``from a import b`` yields ``a`` and ``a.b``; relative imports are resolved; ``import_module("a")`` counts.
    """
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                yield from ((node.lineno, alias.name) for alias in node.names)
            case ast.ImportFrom():
                base = node.module or ""
                if node.level:
                    here = module.split(".") if is_package else module.split(".")[:-1]
                    above = here[: len(here) - node.level + 1]
                    base = ".".join([*above, *([base] if base else [])])
                yield node.lineno, base
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
            case ast.Call(
                func=ast.Name(id=called) | ast.Attribute(attr=called),
                args=[ast.Constant(value=str(name)), *_],
            ):
                if called in {"import_module", "__import__"}:
                    yield node.lineno, name


def imports_of(path: Path, package: Package) -> list[tuple[int, str]]:
    """Return what a module of a package imports, with lines."""
    parts = path.relative_to(package.folder / "src").with_suffix("").parts
    is_package = parts[-1] == "__init__"
    module = ".".join(parts[:-1] if is_package else parts)
    return list(imports(path.read_text(), module, is_package=is_package))


def owner(name: str) -> str:
    """Return the package that brings ``meshfold.name``."""
    part = name.split(".")[1]
    return OWNERS.get(part, part)


def questions(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the opening of each docstring that opens as a question does."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if re.match(rf"({'|'.join(QUESTIONS)})\b", text):
                yield getattr(node, "lineno", 1), text.splitlines()[0]


def identifiers(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of everything that a source names: definitions, variables, arguments, attributes, imports."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.keyword(arg=str(name)):
                yield node.lineno, name
            case ast.alias(name=name, asname=other):
                yield from ((node.lineno, part) for part in (*name.split("."), other) if part)


def replaced(name: str) -> str | None:
    """Return the banned word in an identifier: it is made of words, in snake_case or CamelCase. None without one."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_")
    return next((word for word in BANNED if f"_{word}_" in f"_{words}_"), None)
