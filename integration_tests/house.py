"""What the house tests know about the workspace: its packages, what they may import, and their metadata."""

from __future__ import annotations

import ast
import importlib.metadata
import io
import re
import subprocess
import tokenize
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeGuard

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent

_GROUND = {"mesh", "kernels"}
_PARALLEL = {*_GROUND, "optimizers", "experts", "tensor_parallel", "zero_gemini", "pipeline", "checkpoint", "folding"}
_INTEGRATION = {*_PARALLEL, "engine"}
# The import rule: which siblings a package may import.
SIBLINGS: dict[str, set[str]] = {
    "mesh": set(),
    "kernels": set(),
    "optimizers": set(),
    "experts": _GROUND,
    "tensor_parallel": _GROUND,
    "zero_gemini": _GROUND,
    "pipeline": _GROUND,
    "checkpoint": {"mesh"},
    "models": {*_GROUND, "experts", "tensor_parallel"},
    "folding": {*_GROUND, "tensor_parallel"},
    "inference": {*_GROUND, "models", "tensor_parallel"},
    "engine": _PARALLEL,
    "planner": _INTEGRATION,
    "huggingface": {*_INTEGRATION, "models"},
    "align": {*_INTEGRATION, "models", "inference"},
    "lightning": _INTEGRATION,
    "colossalai": _INTEGRATION,
    "meshfold": {*_INTEGRATION, "models", "planner", "huggingface", "inference", "align"},
}
# Words that no docstring opens with.
QUESTIONS = ("How", "Of", "What", "Where", "Whether", "Which", "Who", "Whom", "Whose")
# Openings of a clause or of an answer: a function's docstring opens with its verb.
CLAUSES = (
    "After",
    "At",
    "Before",
    "Between",
    "During",
    "False",
    "If",
    "In",
    "Inside",
    "Inverse",
    "None",
    "On",
    "Once",
    "True",
)
# Words that no identifier is or contains, and what to write instead (docs/glossary.md has the terms).
BANNED = {
    "connected": "what connects it: wrapped, registered",
    "dealing": "sequence_sharding",
    "dealt": "token_shards, sharded, split",
    "dear": "expensive",
    "foretell": "predict",
    "foretold": "predicted",
    "ghosts": "absent_parameters",
    "handed_over": "what was passed on, and to whom",
    "held_model": "chunked_parameters, or what holds the model",
    "known_of": "parameter_facts",
    "let_go": "release, stop, drop_...",
    "on_trial": "speculative",
    "paces": "timings",
    "pass_through": "stream_on_gpu",
    "passage": "gpu_streaming",
    "politely": "what it avoids: without_raising, if_possible",
    "rehome": "move",
    "residence": "placement",
    "staying": "gather_cache",
    "stretch": "span",
    "stretches": "spans",
    "talk": "exchange, messages",
    "tape": "init_trace",
    "told_to_all": "broadcast",
    "true_dtype": "master_dtype",
    "true_weight": "master_weight",
    "true_weights": "master_weights",
    "untouched": "what it is: unused, unchanged",
    "whereabouts": "rank_status, location",
}
# Files and folders in the root of the repository. What an example, a benchmark or a tool writes is not among them.
TOP_LEVEL = {
    ".ci",
    ".gitignore",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "SECURITY.md",
    "benchmarks",
    "conftest.py",
    "constraints.txt",
    "docs",
    "examples",
    "experiments",
    "integration_tests",
    "mkdocs.yml",
    "packages",
    "pyproject.toml",
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


def closure(roots: list[Requirement]) -> set[str]:
    """Every distribution that pip brings for the requirements, read from what is installed here."""
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    todo = [(bare(root.name), extra) for root in roots for extra in ("", *root.extras)]
    while todo:
        name, extra = todo.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        found.add(name)
        if name in DISTRIBUTIONS:
            project = DISTRIBUTIONS[name].project
            lines = project["optional-dependencies"].get(extra, []) if extra else project["dependencies"]
            requirements = [Requirement(line) for line in lines]
        else:
            requirements = [Requirement(line) for line in importlib.metadata.requires(name) or ()]
        for requirement in requirements:
            marker = requirement.marker
            if name in DISTRIBUTIONS or marker is None or marker.evaluate({"extra": extra}):
                todo += [(bare(requirement.name), more) for more in ("", *requirement.extras)]
    return found


def absent_alone(package: Package) -> list[str]:
    """Return the modules of siblings that are not there where a package is installed without extras."""
    present = closure([Requirement(package.distribution)])
    return [
        f"meshfold.{source.name}"
        for name, sibling in DISTRIBUTIONS.items()
        if name not in present
        for source in sibling.sources
    ]


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield every statement, also those inside functions and classes. It takes no look at expressions, which are most of a tree."""
    todo = [tree]
    while todo:
        node = todo.pop()
        for field in ("body", "handlers", "orelse", "finalbody", "cases"):
            todo += getattr(node, field, ())
        if isinstance(node, ast.stmt):
            yield node


def imports(source: str, module: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield every dotted name that a module's source imports, wherever it does so, with its line.

    ``from a import b`` yields ``a`` and ``a.b``; relative imports are resolved; ``import_module("a")`` counts.
    """
    tree = ast.parse(source)
    by_call = "import_module" in source or "__import__" in source
    for node in ast.walk(tree) if by_call else statements(tree):
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


@cache
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


PUBLIC = {folder: names for package in PACKAGES for folder, names in package.public.items()}


def deep_imports(source: str, package: str) -> Iterator[tuple[int, str, str]]:
    """Yield what a module imports of siblings from behind their public folders.

    Each is a line, the dotted name that is imported, and advice. A public folder may also be imported as a module.
    """
    for node in statements(ast.parse(source)):
        match node:
            case ast.Import():
                names = [("", alias.name) for alias in node.names]
            case ast.ImportFrom(module=str(module), level=0):
                names = [(module, alias.name) for alias in node.names]
            case _:
                continue
        for module, name in names:
            dotted = f"{module}.{name}".lstrip(".")
            if not dotted.startswith("meshfold.") or owner(dotted) == package:
                continue
            if dotted in PUBLIC or name in PUBLIC.get(module, ()):
                continue
            root = ".".join(dotted.split(".")[:2])
            homes = [
                folder for folder, known in PUBLIC.items() if f"{folder}.".startswith(f"{root}.") and name in known
            ]
            advice = " or ".join(f"write 'from {home} import {name}'" for home in homes)
            yield (
                node.lineno,
                dotted,
                advice
                or f"no public folder of {root} exports {name!r}: add it to the __all__ of the folder's __init__.py, or do without",
            )


def private_uses(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each private attribute that code takes from an engine: ``engine._x``, ``self.engine._x``."""
    if "engine._" not in source:  # parsing takes most of the time
        return
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="engine") | ast.Attribute(attr="engine" | "_engine"), attr=attr) if (
                attr.startswith("_") and not attr.startswith("__")
            ):
                yield node.lineno, attr


def tracked(*patterns: str) -> list[str] | None:
    """Return the paths that git tracks and that match, from the root; None where ROOT is not a git checkout."""
    if not (ROOT / ".git").exists():
        return None
    command = ["git", "ls-files", "-z", "--", *patterns]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for path in found.split("\0") if path]


def formatter_comments(source: str) -> Iterator[int]:
    """Yield the line of each comment that turns the formatter off: ``# fmt: off``, ``# fmt: skip`` and yapf's."""
    if not re.search("fmt:|yapf:", source):  # reading tokens takes most of the time
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and re.search(r"#\s*(fmt:\s*(off|skip)|yapf:\s*disable)\b", token.string):
            yield token.start[0]


def wrong_openings(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and opening of each docstring that opens as a question does, or, of a function, with a clause."""
    if not re.search(rf"[\"']\s*({'|'.join((*QUESTIONS, *CLAUSES))})\b", source):  # parsing takes most of the time
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            refused: tuple[str, ...] = QUESTIONS
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                is_property = any("property" in ast.unparse(each) for each in node.decorator_list)
                refused = QUESTIONS if is_property else (*QUESTIONS, *CLAUSES)
            if re.match(rf"({'|'.join(refused)})\b", text):
                yield getattr(node, "lineno", 1), text.splitlines()[0]


def documented(tree: ast.Module) -> set[str]:
    """Return the names of the functions and methods of a module that have a docstring."""
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and ast.get_docstring(node)}


def undocumented(tree: ast.Module, elsewhere: set[str]) -> Iterator[tuple[int, str]]:
    """Yield the public functions, classes and methods of a module without a docstring, with lines.

    A method that a protocol or a base class documents needs none, nor a kernel that its reference documents: ``elsewhere``
    has these names. A property may be explained in the docstring of its class. Methods that every module of torch has need none.
    """

    def is_public(node: ast.stmt) -> TypeGuard[ast.FunctionDef | ast.ClassDef]:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            return False
        decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
        return not decorators & {"overload", "setter"}

    torch_calls = {"forward", "backward", "extra_repr"}
    for node in filter(is_public, tree.body):
        text = ast.get_docstring(node) or ""
        if not text and not (isinstance(node, ast.FunctionDef) and node.name in elsewhere):
            yield node.lineno, node.name
        if isinstance(node, ast.ClassDef):
            for method in filter(is_public, node.body):
                known = ast.get_docstring(method) or method.name in elsewhere | torch_calls or method.name in text
                if not known:
                    yield method.lineno, f"{node.name}.{method.name}"


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


def suspect_identifiers(source: str) -> Iterator[tuple[int, str]]:
    """Yield the ``identifiers`` of a source in which some banned word stands; nothing for the others, which is most."""
    text = source.lower().replace("_", "")
    if any(word.replace("_", "") in text for word in BANNED):  # parsing takes most of the time
        yield from identifiers(source)


@cache
def replaced(name: str) -> str | None:
    """Return the banned word in an identifier: it is made of words, in snake_case or CamelCase. None without one."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_")
    return next((word for word in BANNED if f"_{word}_" in f"_{words}_"), None)
