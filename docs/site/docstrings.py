"""Has griffe, which reads the docstrings for mkdocstrings, rewrite them as Markdown."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from docs.site.text import markdown


class Docstrings(griffe.Extension):
    """Rewrites docstrings when they are read."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Of anything that has one."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
