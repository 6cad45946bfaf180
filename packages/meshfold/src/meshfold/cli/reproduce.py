"""Run a paper's experiment: it writes its table and its plot, and gives a verdict.

  meshfold reproduce --list
  meshfold reproduce tensor-parallel-volume
  meshfold reproduce --all

Experiments are in the repository's folder experiments/; what follows the name goes to the experiment.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshfold.cli.arguments import Failure, nearest

FOLDER = "experiments"
ALL = "all"
"""The program that runs the others of its folder, if there is one: no name of ``--list``."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``meshfold reproduce`` and ``meshfold bench``."""
    parser.usage = f"{parser.prog} NAME ... | --list | --all ..."
    parser.add_argument("--list", action="store_true", help="list the names, each with what it does")
    parser.add_argument("--json", action="store_true", help="with --list: names as JSON")
    parser.add_argument(
        "--all",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="run them all and write one page with what came out, then its own arguments (--all --help)",
    )
    parser.add_argument(
        "name",
        nargs=argparse.REMAINDER,
        metavar="NAME ...",
        help="a name of --list, then its own arguments (NAME --help)",
    )


def run(arguments: argparse.Namespace, folder: str = FOLDER) -> int:
    """Run ``meshfold reproduce``, or the same for another folder."""
    place = find_folder(folder)
    if arguments.list:
        if arguments.json:
            import json

            print(json.dumps(list(programs(place))))
        else:
            print(listing(place))
        return 0
    if arguments.all is not None:
        return run_all(place, arguments.all)
    if not arguments.name:
        raise Failure(f"say which one; there are: {', '.join(programs(place)) or 'none'}")
    name, *rest = arguments.name
    return run_program(place, name, rest)


def find_folder(name: str) -> Path:
    """Return the repository's folder of that name, searched from the working folder upwards, then from an editable install.

    Raises:
        Failure: outside of a clone of Meshfold.
    """
    here = Path.cwd()
    for start in (here, *here.parents, *Path(__file__).resolve().parents):
        if (start / name).is_dir() and (start / "packages" / "engine").is_dir():
            return start / name
    raise Failure(
        f"there is no folder {name!r} of Meshfold's repository here: it is part of the sources, not of the installed "
        "distributions; run this in a clone"
    )


def programs(folder: Path) -> dict[str, Path]:
    """Map names, with dashes, to files: ``<name>.py``, or ``run.py`` or ``__init__.py`` of a folder, with a ``main``."""
    found: dict[str, Path] = {}
    for entry in sorted(folder.iterdir()):
        if entry.stem == ALL:
            continue
        candidates = [entry / "run.py", entry / "__main__.py", entry / "__init__.py"] if entry.is_dir() else [entry]
        for file in candidates:
            if file.suffix == ".py" and file.is_file() and _has_main(file):
                found[entry.stem.replace("_", "-")] = file
                break
    return found


def first_line(file: Path) -> str:
    """Return the first line of a file's docstring, without running the file."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].replace("``", "")


def listing(folder: Path) -> str:
    """Return a line for each program."""
    found = programs(folder)
    width = max(map(len, found), default=0)
    lines = {name: first_line(file).removeprefix(f"meshfold reproduce {name}: ") for name, file in found.items()}
    return "\n".join(f"{name:<{width}}  {line[:1].upper()}{line[1:]}" for name, line in lines.items())


def run_program(folder: Path, name: str, argv: Sequence[str]) -> int:
    """Import a program and call its ``main(argv)``.

    Raises:
        Failure: if no program has that name.
    """
    found = programs(folder)
    file = found.get(name.replace("_", "-"))
    if file is None:
        known = f"There are: {', '.join(found)}" if found else f"{folder} holds none"
        raise Failure(f"there is no {name!r} in {folder.name}.{nearest(name, found)} {known}")
    main: Callable[[Sequence[str]], Any] = _import(folder, file).main
    return int(main(list(argv)) or 0)


def run_all(folder: Path, argv: Sequence[str]) -> int:
    """Run the folder's program that runs all others.

    Raises:
        Failure: if it has none.
    """
    file = folder / f"{ALL}.py"
    if not file.is_file():
        raise Failure(
            f"{folder.name} has nothing that runs all of it; give a name, there are: {', '.join(programs(folder))}"
        )
    main: Callable[[Sequence[str]], Any] = _import(folder, file).main
    return int(main(list(argv)) or 0)


def _has_main(file: Path) -> bool:
    names: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        match node:
            case ast.FunctionDef():
                names.add(node.name)
            case ast.ImportFrom():
                names |= {alias.asname or alias.name for alias in node.names}
            case ast.Assign():
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return "main" in names


def _import(folder: Path, file: Path) -> Any:
    """Import the module under the name that it has for ``import experiments.some.run`` from the repository's root."""
    root = folder.parent
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    parts = file.relative_to(root).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    name = ".".join(parts[:-1] if is_package else parts)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(
        name, file, submodule_search_locations=[str(file.parent)] if is_package else None
    )
    if spec is None or spec.loader is None:
        raise Failure(f"{file} cannot be imported")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
