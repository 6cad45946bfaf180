"""Hooks of mkdocs: the navigation, files from beside ``docs/``, and the reference, as :mod:`docs.site.navigation` says."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from docs.site.navigation import (
    INDEX,
    REFERENCE,
    ROOT,
    Entry,
    file_of,
    front_page,
    is_narrow,
    navigation,
    outside,
    reference,
    reference_page,
    with_links,
)


def on_config(config: Any) -> Any:
    """Set the navigation."""
    config.nav = [_entry(entry) for entry in navigation()]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add what is not in ``docs/``."""
    from mkdocs.structure.files import File

    for place in outside():
        files.append(File.generated(config, place, abs_src_path=str(file_of(place))))
    style = str(Path(__file__).with_name("extra.css"))
    files.append(File.generated(config, "stylesheets/extra.css", abs_src_path=style))
    for name in REFERENCE:
        files.append(File.generated(config, reference_page(name), content=reference(name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lead links to where files are on the site; begin with the pitch."""
    place = page.file.src_uri
    if place.startswith("reference/"):
        return markdown
    if config.repo_url:
        path = file_of(place).relative_to(ROOT).as_posix()
        page.edit_url = f"{config.repo_url.rstrip('/')}/blob/main/{path}"
    return with_links(place, front_page(markdown) if place == INDEX else markdown, config.repo_url or "")


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Put each picture that stands by itself into a box that scrolls where the picture is wider than a phone."""
    return re.sub(r"<p>(<img [^>]*?)\s*/?></p>", _figure, html)


def _figure(picture: re.Match[str]) -> str:
    source = re.search(r'src="(?:[^"]*/)?([^"/]+)"', picture[1])
    if "results/" in picture[1]:
        box = "figure plot"
    else:
        box = "figure" if source is not None and is_narrow(source[1]) else "figure wide"
    return f'<div class="{box}">{picture[1]}></div>'


def _entry(entry: Entry) -> Any:
    if entry.entries:
        return {entry.title: [_entry(inner) for inner in entry.entries]}
    return {entry.title: entry.page} if entry.title else entry.page
