"""What the pages of ``docs/`` show is what is so: files, pictures, links. What code prints: ``test_docs.py``."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from docs.pictures.make import make, pictures
from docs.refresh import ROOT, outputs, with_files

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@each_page
def test_no_output_was_forgotten(page: Path) -> None:
    assert all(output.text for output in outputs(read(page)))


@each_page
def test_files_are_shown_as_they_are(page: Path) -> None:
    text = read(page)
    assert with_files(text) == text, "run python docs/refresh.py"


def anchors(page: Path) -> set[str]:
    """The anchors that a Markdown page's headings make."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", read(page), flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`]*`", "", read(page), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def test_every_page_is_in_the_index() -> None:
    index = read(DOCS / "README.md")
    for page in PAGES:
        name = page.relative_to(DOCS).as_posix()
        assert name == "README.md" or f"({name})" in index, name


def description(picture: Path) -> str:
    """What a picture says that it shows."""
    if picture.suffix == ".svg":
        found = ElementTree.parse(picture).find(".//{http://purl.org/dc/elements/1.1/}description")
        return "" if found is None else found.text or ""
    from PIL import Image

    with Image.open(picture) as image:
        return str(image.info["Description"])


def test_pictures_were_drawn_from_what_the_library_says_now() -> None:
    there = {path.name: description(path) for path in (DOCS / "pictures").iterdir() if path.suffix in (".svg", ".png")}
    wanted = {name: words for name, (words, _) in pictures().items()}
    assert there == wanted, "run python docs/pictures/make.py"


def ground_of(picture: str) -> list[str]:
    """Return the fills of what covers a whole SVG, which a page in dark mode shows as a light box."""
    root = ElementTree.fromstring(picture)
    width = float(root.attrib["viewBox"].split()[2])
    found = []
    shown = [part for part in root if not part.tag.endswith("defs")]  # clips and hatches are there
    for shape in (shape for part in shown for shape in part.iter()):
        kind = shape.tag.rpartition("}")[2]
        if kind == "rect" and float(shape.get("width", 0)) >= width:
            found.append(shape.get("fill", "black"))
        if kind == "path" and re.match(rf"M 0 [\d.]+\s+L {width:g} ", shape.get("d", "")):  # matplotlib's
            fill = re.search(r"fill: ([^;]+)", shape.get("style", ""))
            found.append(fill[1] if fill else "black")
    return [fill for fill in found if fill != "none"]


def test_a_ground_is_found() -> None:
    box = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 48 20">{}</svg>'
    assert ground_of(box.format('<rect width="48" height="20" fill="#fff"/><rect width="9" height="9"/>')) == ["#fff"]
    path = '<path d="M 0 20 \nL 48 20 \nz" style="fill: {}; stroke: none"/>'
    assert ground_of(box.format(path.format("#ffffff"))) == ["#ffffff"]
    assert ground_of(box.format(path.format("none"))) == []


def test_pictures_have_no_ground_of_their_own() -> None:
    """They are shown on white pages and on dark ones."""
    from PIL import Image

    for picture in sorted((DOCS / "pictures").iterdir()):
        if picture.suffix == ".svg":
            assert not ground_of(read(picture)), picture.name
        elif picture.suffix == ".png":
            with Image.open(picture) as image:
                assert image.convert("RGBA").getpixel((0, 0))[3] == 0, picture.name  # type: ignore[index]


def test_every_picture_is_shown() -> None:
    text = "".join(map(read, PAGES))
    assert all(f"pictures/{name})" in text for name in pictures())


def test_pictures_can_be_drawn_anew(tmp_path: Path) -> None:
    made = make(tmp_path)
    assert {path.name: description(path) for path in made} == {name: words for name, (words, _) in pictures().items()}
    first = (tmp_path / "mesh.svg").read_bytes()
    make(tmp_path, "mesh.svg")
    assert (tmp_path / "mesh.svg").read_bytes() == first
