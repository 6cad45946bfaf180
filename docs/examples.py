"""The table of ``examples/README.md``: what each script shows, the command that runs it, what it prints.

python docs/examples.py                 # run the examples, and write the table and the notebook anew
python docs/examples.py own_mode.py     # some of them

A row's script says the rest: the first line of its docstring is what it shows, the last one the command. A new example is a
row ``| [name.py](name.py) | | | |``.
"""

from __future__ import annotations

import ast
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from docs import notebook  # noqa: E402

FOLDER = ROOT / "examples"
TABLE = FOLDER / "README.md"
TIMEOUT_S = 240.0
_ROW = re.compile(r"^\|(?P<files> \[.*?) \|(?P<shows>.*?)\|(?P<command>.*?)\|(?P<prints>.*)\|$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Example:
    """A row of the table.

    Attributes:
        script: the Python file of the row.
        files: the first cell.
        shows: what it shows, in a sentence.
        command: what runs it, from the root of the repository.
        prints: the lines that it prints.
    """

    script: Path
    files: str
    shows: str
    command: str
    prints: tuple[str, ...]

    def __str__(self) -> str:
        printed = "<br>".join(f"`{line}`" for line in self.prints)
        return f"| {self.files} | {self.shows} | `{self.command}` | {printed} |"


def examples(table: str) -> list[Example]:
    """The rows of the table."""
    return [_read(row) for row in _ROW.finditer(table)]


def _read(row: re.Match[str]) -> Example:
    return Example(
        script=FOLDER / re.findall(r"\]\((\w+\.py)\)", row["files"])[-1],
        files=row["files"].strip(),
        shows=row["shows"].strip(),
        command=row["command"].strip().strip("`"),
        prints=tuple(re.findall(r"`([^`]*)`(?:<br>|\s*$)", row["prints"])),
    )


def said(script: Path) -> tuple[str, str]:
    """What a script shows and the command that runs it, as its docstring says."""
    words = (ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or "").splitlines()
    return words[0], words[-1]


def run(command: str, folder: Path, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Run a command in a folder of its own, where ``examples/`` is found: the lines that it prints.

    Raises:
        RuntimeError: if it fails, with all that it said.
    """
    (folder / "examples").symlink_to(FOLDER)
    (folder / "tmp").mkdir()
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env={**environment, "TMPDIR": str(folder / "tmp"), "PORT": str(_free_port())},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode:
        raise RuntimeError(f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return tuple(" ".join(line.split()) for line in done.stdout.splitlines() if line.strip())


def _free_port() -> int:
    """For the nodes of several_nodes.sh: two runs of it on one machine must not meet."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def main(names: list[str]) -> None:
    """Write the rows of these scripts anew, by default all, and the notebooks."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = dict(os.environ, PATH=path)

    def renewed(row: re.Match[str]) -> str:
        old = _read(row)
        if names and old.script.name not in names:
            return row[0]
        print(old.script.name, flush=True)
        shows, command = said(old.script)
        with tempfile.TemporaryDirectory() as folder:
            prints = run(command, Path(folder), environment)
        return str(Example(script=old.script, files=old.files, shows=shows, command=command, prints=prints))

    table = TABLE.read_text(encoding="utf-8")
    TABLE.write_text(_ROW.sub(renewed, table), encoding="utf-8")
    for file in sorted(FOLDER.glob("*.ipynb")):
        if not names or file.name in names:
            print(file.name, flush=True)
            notebook.refresh(file)


if __name__ == "__main__":
    main(sys.argv[1:])
