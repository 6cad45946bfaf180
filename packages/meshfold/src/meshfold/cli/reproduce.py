"""Run a paper's experiment: it writes its table and its plot, and gives a verdict.

  meshfold reproduce --list
  meshfold reproduce tensor-parallel-volume

Experiments are in the repository's folder experiments/; what follows the name goes to the experiment.
"""

from __future__ import annotations

import argparse

from meshfold.cli.failure import Failure
from meshfold.cli.repository import find_folder, listing, programs, run_program

FOLDER = "experiments"


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``meshfold reproduce`` and ``meshfold bench``."""
    parser.usage = f"{parser.prog} NAME ... | --list"
    parser.add_argument("--list", action="store_true", help="list the experiments")
    parser.add_argument("--json", action="store_true", help="with --list: names as JSON")
    parser.add_argument(
        "name", nargs=argparse.REMAINDER, metavar="NAME ...", help="which one, and its own arguments"
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
    if not arguments.name:
        raise Failure(f"say which one; there are: {', '.join(programs(place)) or 'none'}")
    name, *rest = arguments.name
    return run_program(place, name, rest)
