"""Hooks of mkdocs: the navigation, files from beside ``docs/``, and the reference, as :mod:`docs.site.navigation` says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from docs.site.navigation import (
    REFERENCE,
    Entry,
    file_of,
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
    for name in REFERENCE:
        files.append(File.generated(config, reference_page(name), content=reference(name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lead links to where files are on the site."""
    place = page.file.src_uri
    return markdown if place.startswith("reference/") else with_links(place, markdown)


def _entry(entry: Entry) -> Any:
    if entry.entries:
        return {entry.title: [_entry(inner) for inner in entry.entries]}
    return {entry.title: entry.page} if entry.title else entry.page
