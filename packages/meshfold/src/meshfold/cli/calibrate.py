"""Measure this machine, for plans: a small JSON file that `plan`, `suggest` and `train` take as --machine FILE.

  meshfold calibrate --out machine.json
  meshfold calibrate --ranks 2 --device cpu --disk /scratch --out machine.json
  meshfold plan --model llama-8b --parallel data=8 --machine machine.json

It measures matmuls by size and precision, attention, memory, an optimizer step, launches of operators, copies to the host, and
with several ranks their collectives: seconds a call and bytes a second, with the error for sizes that the fit has not seen. It
takes a minute or two. All ranks of a node measure at the same time, as they train. The ranks are started here; under torchrun or
srun those that run are used, and links between nodes are measured too.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from meshfold.cli.arguments import Failure, positive


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``meshfold calibrate``."""
    parser.add_argument(
        "--out", type=Path, default=Path("machine.json"), metavar="FILE", help="file to write (machine.json)"
    )
    parser.add_argument("--ranks", type=positive, metavar="N", help="processes to start (default: one for each GPU)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="(default: GPUs where there are enough)")
    parser.add_argument(
        "--disk", type=Path, metavar="FOLDER", help="also measure the disk of this folder, with 1 GiB a rank"
    )
    parser.add_argument("--name", help="of the machine, in plans (default: its GPU and its ranks)")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the command: the rates say nothing")


def run(arguments: argparse.Namespace) -> int:
    """Run ``meshfold calibrate``, in the process that starts the ranks, or as one of them."""
    from meshfold.mesh.processes import Environment, launch

    here = Environment.detect()
    single = here.source == "single"
    arguments.rank = None if single else here.rank
    _check(arguments)
    ranks = _ranks(arguments) if single else here.world_size
    if not single and arguments.ranks not in (None, ranks):
        raise Failure(f"--ranks {arguments.ranks}, but {here.source} started {ranks}: leave --ranks out")
    if single and ranks > 1:
        return launch(["-m", "meshfold.cli", "calibrate", *arguments.argv], ranks)
    return _as_rank(arguments)


def _check(arguments: argparse.Namespace) -> None:
    """Refuse paths that cannot be written to, before anything is measured."""
    out, disk = arguments.out, arguments.disk
    if out.suffix != ".json":
        raise Failure(
            f"--out {out} must end in .json, by which --machine knows a file: write --out {out.with_suffix('.json')}"
        )
    folder = next(one for one in out.absolute().parents if one.exists())
    if out.is_dir() or not folder.is_dir() or not os.access(out if out.exists() else folder, os.W_OK):
        raise Failure(f"--out {out} cannot be written: give a file in a folder of yours")
    if disk is not None and not disk.is_dir():
        raise Failure(
            f"--disk {disk}: there is no such folder; give one on the disk that zero's offload_path is to use"
        )


def _ranks(arguments: argparse.Namespace) -> int:
    """Return the number of ranks to start."""
    import torch

    gpus = 0 if arguments.device == "cpu" or not torch.cuda.is_available() else torch.cuda.device_count()
    ranks: int = arguments.ranks or max(1, gpus)
    if arguments.device == "cuda" and gpus < ranks:
        raise Failure(f"--device cuda needs a GPU for each of {ranks} ranks, and torch sees {gpus}: use --device cpu")
    return ranks


def _as_rank(arguments: argparse.Namespace) -> int:
    from meshfold.mesh.processes import start
    from meshfold.planner.calibration import TINY, Effort, calibrate, calibration_table, write_machine

    with start(device=arguments.device) as process:
        effort = TINY if arguments.tiny else Effort()
        found = calibrate(process, effort, disk=arguments.disk, name=arguments.name)
        if process.rank == 0:
            write_machine(found.machine, arguments.out, found.samples())
            print(f"{found.machine.name}, {found.ranks} ranks, {process.backend}\n\n{calibration_table(found)}")
            print(f"\n{arguments.out} has it: meshfold suggest --machine {arguments.out} ...")
    return 0
