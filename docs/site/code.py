"""Bash with here-documents: the file that a here-document writes is highlighted in its own language."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import BashLexer, JsonLexer, PythonLexer

_HERE_DOCUMENT = re.compile(
    r"(?P<before>^[^\n]*>\s*\S+\.(?P<kind>py|json)\s*<<\s*'?(?P<end>\w+)'?[^\n]*\n)(?P<file>.*?\n)(?=(?P=end)$)",
    re.DOTALL | re.MULTILINE,
)
_LEXERS = {"py": PythonLexer, "json": JsonLexer}


class BashWithFiles(BashLexer):
    """Lexer of bash that hands the text of here-documents to the lexer of the file they write."""

    def get_tokens_unprocessed(self, text: str, stack: Any = ("root",)) -> Iterator[tuple[int, Any, str]]:
        """Yield index, token type and text, as every lexer does."""
        at = 0
        for found in _HERE_DOCUMENT.finditer(text):
            start = found.start("file")
            yield from _moved(at, super().get_tokens_unprocessed(text[at:start], stack))
            lexer = _LEXERS[found["kind"]]()
            yield from _moved(start, lexer.get_tokens_unprocessed(found["file"]))
            at = found.end("file")
        yield from _moved(at, super().get_tokens_unprocessed(text[at:], stack))


def _moved(start: int, tokens: Iterator[tuple[int, Any, str]]) -> Iterator[tuple[int, Any, str]]:
    for index, kind, text in tokens:
        yield start + index, kind, text


def fence(source: str, language: str, css_class: str, options: Any, md: Any, **kwargs: Any) -> str:
    """Return the HTML of a fenced block of bash; the signature is the one of ``pymdownx.superfences``."""
    formatter = HtmlFormatter(cssclass="highlight", wrapcode=True)
    html: str = highlight(source, BashWithFiles(), formatter)
    return html
