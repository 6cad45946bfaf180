"""Docstrings as Markdown: examples become code, and what is for other tools is left out. Pure Python."""

from __future__ import annotations

import re

_EXAMPLE = re.compile(r"(?:^(?P<indent> *)>>> .*\n(?:^(?P=indent)\S.*\n)*)+", re.MULTILINE)
_ROLE = re.compile(r":(?:func|class|meth|mod|data|attr|exc):(?=`)")
_SKIPPED = re.compile(r" *# doctest: \+SKIP$", re.MULTILINE)
_LITERAL = re.compile(r"^(?P<before>.*\S)?::$", re.MULTILINE)


def markdown(text: str) -> str:
    """A docstring as Markdown reads it: else ``>>>`` would quote, and roles of reStructuredText show."""

    def fenced(match: re.Match[str]) -> str:
        indent = match["indent"]
        return f"{indent}```pycon\n{match[0]}{indent}```\n"

    text = _SKIPPED.sub("", _ROLE.sub("", text))
    text = _LITERAL.sub(lambda match: f"{match['before']}:" if match["before"] else "", text)
    return _EXAMPLE.sub(fenced, f"{text}\n").removesuffix("\n")
