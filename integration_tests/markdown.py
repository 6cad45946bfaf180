"""Code blocks of a page of documentation, and the script that runs them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"(?P<indent> *)(?P<fence>`{3,}|~{3,})\s*(?P<language>[^\s`]*)[^`]*")
_COMMENT = re.compile(r"<!--\s*(?P<word>run|no-run)\s*(?P<colon>:?)\s*(?P<reason>.*?)\s*-->")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block of code.

    Attributes:
        language: what stands behind the fence.
        line: number of the first line of code in the page, from 1.
        code: the code, its indentation in the page taken off.
        mark: ``"run"``, ``"no-run"`` or ``""``: the HTML comment on the line before the fence.
        reason: what the comment says.
    """

    language: str
    line: int
    code: str
    mark: str = ""
    reason: str = ""

    @property
    def runs(self) -> bool:
        """Python runs unless marked ``<!-- no-run: reason -->``; bash runs where marked ``<!-- run -->``."""
        return (self.language == "python" and self.mark != "no-run") or (self.language == "bash" and self.mark == "run")


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page in order.

    Raises:
        ValueError: for a fence that never closes, or a mark that stands before no block, does not fit its
            language, or gives no reason.
    """
    found: list[Block] = []
    lines = text.splitlines()
    mark, reason = "", ""
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        fence = _FENCE.fullmatch(line)
        if fence is None:
            comment = _COMMENT.fullmatch(line.strip())
            if mark and line.strip():
                raise ValueError(f"line {at}: the comment <!-- {mark} --> above stands before no block of code")
            if comment:
                mark, reason = comment["word"], comment["reason"]
                if mark == "no-run" and not reason:
                    raise ValueError(f"line {at}: say why: <!-- no-run: reason -->")
            continue
        start, indent = at, len(fence["indent"])
        while at < len(lines) and not re.fullmatch(rf" *{fence['fence']}{fence['fence'][0]}*\s*", lines[at]):
            at += 1
        if at == len(lines):
            raise ValueError(f"line {start}: the block of code never ends")
        language = fence["language"]
        if (mark, language) not in {("", language), ("run", "bash"), ("no-run", "python")}:
            raise ValueError(f"line {start}: <!-- {mark} --> does nothing before a block of {language or 'text'}")
        code = [row[indent:] if not row[:indent].strip() else row for row in lines[start:at]]
        found.append(Block(language=language, line=start + 1, code="\n".join(code), mark=mark, reason=reason))
        mark, reason = "", ""
        at += 1
    if mark:
        raise ValueError(f"the last comment <!-- {mark} --> stands before no block of code")
    return found


def write_script(text: str, path: Path, *, bash: bool = True, watched: bool = False) -> None:
    """The page as one Python script: every line stands where it stands in the page, so tracebacks point there.

    Blocks share a namespace. A bash block is written beside the script and called on its first line (left out
    with ``bash=False``); a process that imports the script again, as spawned ranks do, skips it. With ``watched`` standard
    output is told, on the line of a block's fence, that the block begins (``page.Printed``).
    """
    script = [""] * (len(text.splitlines()) + 1)
    for number, block in enumerate(block for block in blocks(text) if block.runs):
        if watched:
            script[block.line - 2] = f"__name__ == '__main__' and __import__('sys').stdout.block({number})"
        if block.language == "python":
            for offset, row in enumerate(block.code.splitlines()):
                script[block.line - 1 + offset] = row
        elif bash:
            part = path.with_suffix(f".{block.line}.sh")
            part.write_text(block.code + "\n")
            command = ["bash", "-euo", "pipefail", str(part)]
            call = f"__import__('subprocess').run({command!r}, check=True)"
            script[block.line - 1] = f"__name__ == '__main__' and {call}"
    path.write_text("\n".join(script) + "\n")
