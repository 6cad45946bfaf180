"""Train a small GPT on the source of Python's standard library, and see what happens.

It runs under parallel=dict(data=2, tensor=dict(mode="2d", size=4)) on 8 local processes: on GPUs if there are 8 (with 4, only the
tensor part), otherwise on the CPU, which takes a few minutes. It prints the plan and the progress, and ends with a checkpoint, a
plot of the loss, a sample of text, and the parallel and the serial loss side by side.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from meshfold.cli import train
from meshfold.cli.arguments import Failure, positive
from meshfold.cli.train_arguments import words_of
from meshfold.cli.train_checks import check_out


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``meshfold demo``."""
    parser.add_argument("--out", default="demo", metavar="DIR", help="folder to write to (demo)")
    parser.add_argument("--steps", type=positive, default=250, metavar="N", help="optimizer steps (250)")
    parser.add_argument(
        "--serial-steps", type=positive, default=20, metavar="N", help="of them, again on one process (20)"
    )
    parser.add_argument("--sample-tokens", type=positive, default=250, metavar="N", help="bytes of text to write (250)")


def run(arguments: argparse.Namespace) -> int:
    """Run ``meshfold demo``."""
    check_out(arguments.out)
    import torch

    from meshfold.train.demo import compare_with_serial, list_files, remove_files, scene, settings

    out = Path(arguments.out)
    _check_free(out)
    here = scene(torch.cuda.device_count())
    chosen = settings(here, arguments.out, steps=arguments.steps, sample_tokens=arguments.sample_tokens)
    print(f"Meshfold's demo: {here.why}.\n")
    remove_files(out)
    try:
        code = train.start(chosen, words_of(chosen))
        if code:
            return code
        serial_steps = min(arguments.serial_steps, arguments.steps)
        print(f"the first {serial_steps} steps again, with the serial model on one process ...", flush=True)
        print(compare_with_serial(chosen, serial_steps))
    finally:  # also after Ctrl-C
        list_files(out)
    print(f"\nAll of it is in {arguments.out}/: checkpoint/, metrics.jsonl, loss.png and sample.txt.")
    return 0


def _check_free(out: Path) -> None:
    """Check that the demo's folder only holds files of an earlier demo."""
    from meshfold.train.demo import foreign_files

    found = foreign_files(out)
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise Failure(
            f"--out {str(out)!r}: {found[0]}{more} would be replaced, and was not written by a demo that came to its end, or has "
            "changed since; choose another --out, or move it away"
        )
