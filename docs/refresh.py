"""Run the pages and write into them what their blocks of code print.

    python docs/refresh.py                    # every page of this folder
    python docs/refresh.py docs/kernels.md     # some of them

A block of text after ``<!-- prints -->`` is what the block of code before it prints, to the letter. After ``<!-- printed:
reason -->`` it is what one run printed, with the reason why another run prints other numbers. A test compares both
(``integration_tests/test_docs.py``), the second without its numbers, unless the reason begins with "it depends". What stands
between ``<!-- from FILE -->`` and ``<!-- end of FILE -->`` is that file of the repository. Pictures are made by
``docs/pictures/make.py``.
"""

from __future__ import annotations

import contextlib
import io
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from integration_tests.markdown import Block, blocks  # noqa: E402

_MARK = re.compile(r"<!-- (prints|printed: (?P<reason>\S.*?)) -->")
_SECRET = "meshfold page, block "


@dataclass(frozen=True, kw_only=True)
class Output:
    """A block of text that shows what code prints.

    Attributes:
        first, last: the lines of text it has now, from 0; ``last`` is the closing fence.
        text: these lines.
        exact: whether it must be this to the letter.
        reason: why it need not.
        source: number of the block of code, among those that run.
    """

    first: int
    last: int
    text: str
    exact: bool
    reason: str
    source: int


def running(page: str) -> list[Block]:
    """The blocks of a page that run, in order."""
    return [block for block in blocks(page) if block.runs]


def outputs(page: str) -> list[Output]:
    """The blocks of a page that show what code prints.

    Raises:
        ValueError: for a mark that stands before no block of text, or before any code.
    """
    lines, code = page.splitlines(), running(page)
    found = []
    for number, line in enumerate(lines):
        mark = _MARK.fullmatch(line.strip())
        if mark is None:
            continue
        source = sum(block.line <= number for block in code) - 1
        if number + 1 >= len(lines) or lines[number + 1].strip() != "```text" or source < 0:
            raise ValueError(f"line {number + 1}: {line.strip()} stands before no ```text, or before any code")
        last = next(i for i in range(number + 2, len(lines)) if lines[i].strip() == "```")
        found.append(
            Output(
                first=number + 2,
                last=last,
                text="\n".join(lines[number + 2 : last]),
                exact=mark["reason"] is None,
                reason=mark["reason"] or "",
                source=source,
            )
        )
    return found


def run_here(page: str, name: str, *wanted: str) -> tuple[list[str], dict[str, Any]]:
    """Run a page's Python in this process and folder: what each block printed, and the names it leaves.

    Bash is left out, as if it printed nothing. With ``wanted`` names the page ends with the block behind which it has all.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for block in running(page):
        if wanted and namespace.keys() >= {*wanted}:
            break
        if block.language != "python":
            printed.append("")
            continue
        with contextlib.redirect_stdout(io.StringIO()) as caught:
            exec(compile("\n" * (block.line - 1) + block.code, name, "exec"), namespace)
        printed.append(caught.getvalue())
    return printed, namespace


def run_apart(page: str, name: str) -> list[str]:
    """Run a page in a process and an empty folder of its own: what each block printed, errors too.

    Raises:
        RuntimeError: if a block fails.
    """
    with tempfile.TemporaryDirectory(prefix="meshfold-docs-") as folder:
        script = Path(folder) / "page.py"
        script.write_text("\n".join(_steps(page, Path(folder))))
        work = Path(folder) / "work"
        work.mkdir()
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        environment = dict(os.environ, MPLBACKEND="agg", PYTHONUNBUFFERED="1", PATH=path)
        done = subprocess.run(
            [sys.executable, str(script)],
            cwd=work,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stdout}")
    parts = re.split(rf"^{_SECRET}\d+\n", done.stdout, flags=re.MULTILINE)
    return parts[1:]


def _steps(page: str, folder: Path) -> Iterator[str]:
    yield "import subprocess\nnamespace = {'__name__': '__main__'}"
    for number, block in enumerate(running(page)):
        yield f"print({_SECRET + str(number)!r}, flush=True)"
        if block.language == "python":
            yield f"exec(compile({block.code!r}, 'page', 'exec'), namespace)"
        else:
            part = folder / f"{number}.sh"
            part.write_text(block.code + "\n")
            yield f"subprocess.run(['bash', '-euo', 'pipefail', {str(part)!r}], check=True)"


def with_files(page: str) -> str:
    """The page with the files that it shows as they are now."""

    def show(found: re.Match[str]) -> str:
        text = (ROOT / found["file"]).read_text(encoding="utf-8").strip()
        return f"<!-- from {found['file']} -->\n\n{text}\n\n<!-- end of {found['file']} -->"

    return re.sub(r"<!-- from (?P<file>\S+) -->.*?<!-- end of (?P=file) -->", show, page, flags=re.DOTALL)


def refreshed(page: str, name: str) -> str:
    """The page with the files that it shows and what its code prints now."""
    page = with_files(page)
    wanted = outputs(page)
    if not wanted:
        return page
    bash = any(block.language == "bash" for block in running(page))
    if bash:
        printed = run_apart(page, name)
    else:
        with (
            tempfile.TemporaryDirectory(prefix="meshfold-docs-") as folder,
            contextlib.chdir(folder),
        ):  # pages write files
            printed, _ = run_here(page, name)
    lines = page.splitlines()
    for output in reversed(wanted):
        lines[output.first : output.last] = tidy(printed[output.source]).splitlines()
    return "\n".join(lines) + "\n"


def tidy(text: str) -> str:
    """Printed text as a page shows it: no blanks at the ends, nothing that names this machine."""
    text = text.replace(str(ROOT) + os.sep, "").replace(platform.platform(), platform.system())
    text = re.sub(r"/\S+/work/", "", text)  # the folder that the page runs in
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")


def main(argv: list[str]) -> None:
    """Refresh pages in place."""
    for page in [Path(name) for name in argv] or sorted((ROOT / "docs").rglob("*.md")):
        before = page.read_text(encoding="utf-8")
        after = refreshed(before, page.name)
        if after != before:
            page.write_text(after, encoding="utf-8")
        print(f"{'changed  ' if after != before else 'unchanged'}  {page}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
