"""The site of ``make docs`` has every page, every public name, and links that lead somewhere; nothing is built here."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import get_origin

import pytest
from docs.site.navigation import (
    BESIDE,
    REFERENCE,
    ROOT,
    Entry,
    file_of,
    is_narrow,
    navigation,
    outside,
    place_of,
    public_names,
    reference,
    with_links,
)
from docs.site.text import markdown

from integration_tests.house import APPLICATION, PACKAGES

DOCS = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))


def pages(entries: list[Entry]) -> Iterator[str]:
    for entry in entries:
        if entry.page:
            yield entry.page
        yield from pages(list(entry.entries))


def test_every_page_is_in_the_navigation_once() -> None:
    found = list(pages(navigation()))
    assert len(found) == len(set(found))
    assert set(DOCS) <= set(found)
    assert all(page.startswith("reference/") or file_of(page).is_file() for page in found)


def test_the_order_is_that_of_the_index() -> None:
    sections = {entry.title: list(pages([entry])) for entry in navigation() if entry.title}
    titles = list(sections)
    assert titles[0] == "Meshfold"
    assert titles[-2:] == ["Experiments and benchmarks", "Reference"]
    headings = re.findall(r"^## (.+)$", (ROOT / "docs" / "README.md").read_text(), flags=re.MULTILINE)
    assert titles[1:-2] == headings
    assert sections["Start"][0] == "getting-started.md"
    assert f"{BESIDE}/examples/README.md" in sections["Start"]
    assert "modes/2d.md" in sections["Understand"]


OUTSIDE = outside()


@pytest.mark.parametrize("page", [*DOCS, *(page for page in OUTSIDE if page.endswith(".md"))])
def test_links_lead_to_files_of_the_site(page: str) -> None:
    known = {*DOCS, *OUTSIDE, *(f"pictures/{path.name}" for path in (ROOT / "docs" / "pictures").iterdir())}
    text = with_links(page, file_of(page).read_text())
    text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:|#", target):
            continue
        folder = page.rpartition("/")[0]
        parts: list[str] = folder.split("/") if folder else []
        for part in target.partition("#")[0].split("/"):
            parts = parts[:-1] if part == ".." else [*parts, part]
        assert "/".join(parts) in known, target


def test_links_are_moved_as_the_pages_are() -> None:
    assert place_of("own-mode.md", "../CONTRIBUTING.md") == f"{BESIDE}/CONTRIBUTING.md"
    assert with_links("own-mode.md", "[a](../CONTRIBUTING.md#x)") == f"[a]({BESIDE}/CONTRIBUTING.md#x)"
    assert with_links(f"{BESIDE}/CONTRIBUTING.md", "[a](docs/modes/2d.md)") == "[a](../modes/2d.md)"
    assert with_links("README.md", "![a](pictures/mesh.svg)") == "![a](pictures/mesh.svg)"
    assert with_links("modes/2d.md", "[a](../../packages) `[b](c)`") == "a `[b](c)`"
    assert with_links("modes/2d.md", "[a](https://arxiv.org) [b](#c)") == "[a](https://arxiv.org) [b](#c)"


def test_every_picture_fits_a_phone() -> None:
    names = [path.name for path in (ROOT / "docs" / "pictures").iterdir() if path.suffix in (".svg", ".png")]
    assert names and [name for name in names if not is_narrow(name)] == []
    assert not is_narrow("unknown.svg")


def test_every_public_package_has_a_reference() -> None:
    """All that the distributions bring; the application is a command, and has a page of its own."""
    brought = {path.name for package in PACKAGES if package.name != APPLICATION for path in package.sources}
    assert {name for name in REFERENCE if "." not in name} == brought


@pytest.mark.parametrize("name", REFERENCE)
def test_a_reference_has_every_public_name(name: str) -> None:
    module = importlib.import_module(f"meshfold.{name}")
    assert public_names(name) == module.__all__
    page = reference(name)
    for public in module.__all__:
        assert re.search(rf"^::: meshfold\.\S*\b{public}$", page, flags=re.MULTILINE)
        assert is_documented(getattr(module, public), public, module), f"{public} has no docstring"


def is_documented(found: object, name: str, module: ModuleType) -> bool:
    """Return whether a public name has a docstring; that of an alias such as ``Callable[...]`` stands behind its assignment."""
    if get_origin(found) is None:
        return bool(getattr(found, "__doc__", None))
    sources = Path(str(module.__file__)).parent.rglob("*.py")
    return any(re.search(rf'^{name}(: TypeAlias)? = [^\n]*\n"""\w', path.read_text(), re.MULTILINE) for path in sources)


DOCSTRING = """\
Boosts, see :class:`a.B`:

>>> with boosted():  # doctest: +SKIP
...     3
3

In a folder::

    model.safetensors

Args:
    x: of it."""

MARKDOWN = """\
Boosts, see `a.B`:

```pycon
>>> with boosted():
...     3
3
```

In a folder:

    model.safetensors

Args:
    x: of it."""


def test_docstrings_become_markdown() -> None:
    assert markdown(DOCSTRING) == MARKDOWN
    assert markdown(MARKDOWN.replace(">>> ", "").replace("... ", "")) == MARKDOWN.replace(">>> ", "").replace(
        "... ", ""
    )
