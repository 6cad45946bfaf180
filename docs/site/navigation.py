"""What the site is made of: the order of its pages, pages from beside ``docs/``, and links between all of them.

Pure Python: ``integration_tests/test_site.py`` checks it without building anything.
"""

from __future__ import annotations

import ast
import contextlib
import os
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INDEX = "README.md"
BESIDE = "repository"
"""Where on the site files lie that are not in ``docs/``."""

STUDIES = (f"{BESIDE}/experiments/", f"{BESIDE}/benchmarks/")

REFERENCE = (
    "mesh",
    "kernels",
    "tensor_parallel",
    "pipeline",
    "sequence",
    "zero_gemini",
    "checkpoint",
    "optimizers",
    "experts",
    "align",
    "models",
    "folding",
    "inference",
    "engine",
    "planner",
    "huggingface",
    "lightning",
    "colossalai",
)
"""Public packages, under ``meshfold``."""

PHONE = 480
"""The widest picture that a phone shows whole, in the picture's own units."""

_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
_SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
_CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A page of the navigation, or a section.

    Attributes:
        title: what is shown; of a page "" lets its heading stand.
        page: its place on the site; "" for a section.
        entries: of a section.
    """

    title: str
    page: str = ""
    entries: tuple[Entry, ...] = ()


def navigation() -> list[Entry]:
    """The order of ``docs/README.md``: its sections, and in each the pages that it links to; what they link to; the reference.

    Pages in folders (``modes/``) are a section of their own, behind the folder's README.
    """
    text = (ROOT / "docs" / INDEX).read_text(encoding="utf-8")
    parts = _SECTION.split(text)[1:]
    sections, listed = [Entry(title="Meshfold", page=INDEX)], set[str]()
    for title, body in zip(parts[::2], parts[1::2], strict=True):
        places = (place_of(INDEX, target) for target in _targets(body))
        pages = dict.fromkeys(place for place in places if place is not None and place.endswith(".md"))
        listed.update(pages)
        sections.append(Entry(title=title, entries=tuple(_folded(list(pages)))))
    beside = [page for page in outside() if page.endswith(".md") and page not in listed]
    studies = [page for page in beside if page.startswith(STUDIES)]
    reference = tuple(Entry(title=f"meshfold.{name}", page=reference_page(name)) for name in REFERENCE)
    return [
        *sections,
        Entry(title="Experiments and benchmarks", entries=tuple(map(_study, studies))),
        *(Entry(title="", page=page) for page in beside if page not in studies),
        Entry(title="Reference", entries=reference),
    ]


def _study(page: str) -> Entry:
    """A page of an experiment or a benchmark; tables have no heading that could stand for them."""
    place = Path(page)
    if place.name == "README.md":
        return Entry(title="", page=page)
    name = place.parent.parent.name if place.stem == "table" else place.stem
    return Entry(title=f"Table: {name.replace('_', ' ')}", page=page)


def _folded(pages: list[str]) -> Iterator[Entry]:
    """Pages in order; those of a folder of ``docs/`` together, where the first of them stands."""
    done: set[str] = set()
    for page in pages:
        folder = posixpath.dirname(page)
        if not folder or folder.startswith(BESIDE):
            yield Entry(title="", page=page)
        elif folder not in done:
            done.add(folder)
            inside = tuple(Entry(title="", page=other) for other in pages if posixpath.dirname(other) == folder)
            yield Entry(title=folder.capitalize(), entries=inside)


def front_page(index: str) -> str:
    """Return the first page of the site: the README's pitch in place of the heading of ``docs/README.md``."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    pitch = readme[: readme.index("\n## ")].replace("](docs/", "](")
    return f"{pitch}\n{index[index.index(chr(10)) :]}"


def reference_page(name: str) -> str:
    """The place of a package's reference."""
    return f"reference/{name}.md"


def reference(name: str) -> str:
    """The page of a package: its docstring, then each public name."""
    module = f"meshfold.{name}"
    lines = [
        f"# {module}",
        "",
        f"::: {module}",
        "    options:",
        "      show_root_heading: false",
        "      members: false",
        "",
    ]
    elsewhere = _lazy_names(name)
    for public in public_names(name):
        lines += [f"::: {elsewhere.get(public, module)}.{public}", ""]
    return "\n".join(lines)


def _lazy_names(name: str) -> dict[str, str]:
    """Return the modules of names that a package imports when they are asked for, and no type checker sees."""
    tree = ast.parse(source_of(name).read_text(encoding="utf-8"))
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            with contextlib.suppress(ValueError):
                found.update(ast.literal_eval(node.value))
    return {public: module for public, module in found.items() if public not in imported}


def public_names(name: str) -> list[str]:
    """``__all__`` of a package, read without importing it."""
    tree = ast.parse(source_of(name).read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            found: list[str] = ast.literal_eval(node.value)
            return found
    raise ValueError(f"meshfold.{name} has no __all__")


def source_of(name: str) -> Path:
    """A package's ``__init__.py``."""
    inside = Path("src", "meshfold", *name.split("."), "__init__.py")
    [found] = [path for folder in (ROOT / "packages").iterdir() if (path := folder / inside).is_file()]
    return found


def outside() -> list[str]:
    """Files that are not in ``docs/`` and that pages link to, by their place on the site; also those these link to."""
    found: dict[str, None] = {}
    waiting = [page.relative_to(ROOT / "docs").as_posix() for page in sorted((ROOT / "docs").rglob("*.md"))]
    while waiting:
        page = waiting.pop(0)
        for target in _targets(file_of(page).read_text(encoding="utf-8")):
            place = place_of(page, target)
            if place is not None and place.startswith(f"{BESIDE}/") and place not in found:
                found[place] = None
                if place.endswith(".md"):
                    waiting.append(place)
    return list(found)


def file_of(page: str) -> Path:
    """The file of a place on the site."""
    inside = page.removeprefix(f"{BESIDE}/")
    return ROOT / inside if inside != page else ROOT / "docs" / page


def place_of(page: str, target: str) -> str | None:
    """Where on the site a link leads from a page; None for what is no file of the repository."""
    if re.match(r"[a-z]+:", target) or target.startswith("#"):
        return None
    path = Path(os.path.normpath(file_of(page).parent / target.partition("#")[0]))
    if not path.is_file() or not path.is_relative_to(ROOT):
        return None
    if path.is_relative_to(ROOT / "docs"):
        return path.relative_to(ROOT / "docs").as_posix()
    return f"{BESIDE}/{path.relative_to(ROOT).as_posix()}"


def with_links(page: str, text: str, repository: str = "") -> str:
    """Return a page with its links as they lead on the site.

    A link to a folder leads to ``repository``, the address of the repository on a code host; without it, it
    becomes plain text.
    """

    def moved(match: re.Match[str]) -> str:
        target = match["target"]
        if re.match(r"[a-z]+:", target) or target.startswith("#"):
            return match[0]
        place = place_of(page, target)
        if place is None:
            folder = Path(os.path.normpath(file_of(page).parent / target))
            if not repository or not folder.is_dir():
                return match["text"]
            return f"[{match['text']}]({repository}/tree/main/{folder.relative_to(ROOT).as_posix()})"
        anchor = target[target.index("#") :] if "#" in target else ""
        there = posixpath.relpath(place, posixpath.dirname(page) or ".")
        return f"{match['image']}[{match['text']}]({there}{anchor})"

    parts = _CODE.split(text)  # code between links stays as it is
    return "".join(part if number % 2 else _LINK.sub(moved, part) for number, part in enumerate(parts))


def _targets(text: str) -> list[str]:
    return [
        match["target"].partition("#")[0] for match in _LINK.finditer(_CODE.sub("", text)) if match["target"][0] != "#"
    ]


def is_narrow(picture: str) -> bool:
    """Return whether a picture of ``docs/pictures`` fits a phone without being shrunk."""
    path = ROOT / "docs" / "pictures" / picture
    if not path.is_file():
        return False
    if path.suffix == ".png":  # its width stands in the header
        return int.from_bytes(path.read_bytes()[16:20], "big") <= 2 * PHONE
    found = re.search(r'viewBox="0 0 ([\d.]+) ', path.read_text(encoding="utf-8"))
    return found is not None and float(found[1]) <= PHONE
