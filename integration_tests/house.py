"""What the house tests know about the workspace: its packages, what they may import, and their metadata."""

from __future__ import annotations

import ast
import re
import tomllib
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
