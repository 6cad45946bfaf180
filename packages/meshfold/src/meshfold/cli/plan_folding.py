"""``meshfold plan`` of a folding model: a table over numbers of residues and of GPUs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING

from meshfold.cli.arguments import PICTURES, Failure, check_file, positive, reason_of
from meshfold.cli.machine_options import chosen_machine

if TYPE_CHECKING:
    from meshfold.folding import FoldingOutline

PREFIX = "folding:"
_ONLY = {
    "residues": "--residues",
    "gpus": "--gpus",
    "sequences": "--sequences",
    "training": "--training",
    "plot": "--plot",
}
_NEVER = {
    "ranks": "--ranks",
    "seq_len": "--seq-len",
    "changes": "--set",
    "rules": "--rule",
    "fp8": "--fp8",
    "recompute": "--recompute",
    "timeline": "--timeline",
    "trace": "--trace",
    "host_memory": "--host-memory",
}


def add_folding(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that only folding models take."""
    group = parser.add_argument_group(
        "folding models",
        "--model folding:evoformer, extra-msa, pairformer, esmfold or esmfold2, or a folder of EsmForProteinFolding or "
        "EsmFold2Model",
    )
    group.add_argument("--residues", type=_counts, metavar="N,N", help="tokens of a chain: 512,1024,2048")
    group.add_argument("--gpus", type=_counts, metavar="N,N", help="GPUs that share a protein: 1,2,4,8 (1,2,4,8)")
    group.add_argument("--sequences", type=positive, metavar="N", help="of the MSA (the model's)")
    group.add_argument("--training", action="store_true", help="plan a step of training (default: a pass at inference)")
    group.add_argument("--plot", metavar="FILE", help="draw memory against residues: .svg, .png")


def is_folding(arguments: argparse.Namespace) -> bool:
    """Return True for a preset or a folder of a folding model.

    Raises:
        Failure: for arguments of folding models with another model.
    """
    name = arguments.model or arguments.hf or ""
    if name.startswith(PREFIX) or _is_folding_folder(name):
        return True
    typed = [option for key, option in _ONLY.items() if getattr(arguments, key)]
    if typed:
        given = f"--model is {name}" if name else "no --model is given"
        raise Failure(f"{typed[0]} is for folding models, and {given}: write --model folding:esmfold, say")
    return False


def _is_folding_folder(name: str) -> bool:
    path = os.path.join(name, "config.json")
    if not name or not os.path.isfile(path):
        return False
    try:
        with open(path, encoding="utf-8") as file:
            told = json.load(file)
    except (OSError, ValueError):
        return False  # whoever reads the folder says what is wrong
    return (
        bool(told.get("is_folding_model"))
        or "Fold" in "".join(told.get("architectures") or ())
        or told.get("model_type") == "esmfold2"
    )


def plan_folding_model(arguments: argparse.Namespace) -> int:
    """Plan a folding model, print the table and what to paste.

    Raises:
        Failure: for arguments that folding models do not take, without ``--residues``, and if nothing fits.
    """
    _check_arguments(arguments)
    from meshfold.planner.folding import (
        FoldingOption,
        draw_folding,
        folding_numbers,
        folding_text,
        lines_to_paste,
        longest_that_fits,
        plan_folding,
    )

    machine = chosen_machine(arguments, arguments.machine or "h200x8")
    outline = _outline_of(arguments.model or arguments.hf)
    over = sys.stderr.isatty()

    def announce(option: FoldingOption) -> None:
        if over:
            print(f"\r\x1b[K{option.residues:,} residues, {option.gpus} GPUs", end="", file=sys.stderr, flush=True)

    found = plan_folding(
        outline,
        machine,
        residues=arguments.residues,
        gpus=arguments.gpus or [1, 2, 4, 8],
        sequences=arguments.sequences,
        batch=arguments.batch_size or 1,
        precision=arguments.precision or "bf16",
        training=arguments.training,
        optimizer=arguments.optimizer,
        on_option=announce,
    )
    if over:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    if arguments.plot is not None:
        try:
            draw_folding(found, arguments.plot)
        except OSError as error:
            raise Failure(reason_of(error)) from error
    longest = longest_that_fits(found)
    if arguments.json:
        print(json.dumps(folding_numbers(found), indent=1))
    else:
        print(folding_text(found))
        if longest is not None:
            folds = outline.folds
            print(
                f"\n{longest.residues:,} residues on {longest.plan.run.ranks}:\n{lines_to_paste(longest, folds=folds)}"
            )
    if longest is None:
        least = min(found.options, key=lambda one: one.plan.bytes)
        raise Failure(
            f"nothing fits: {least.residues} residues on {least.plan.run.ranks} need {least.plan.bytes / 2**30:.2f} GiB a GPU. "
            "Give fewer --residues, more --gpus or a larger --gpu-memory",
            code=1,
        )
    return 0


def _check_arguments(arguments: argparse.Namespace) -> None:
    """Refuse arguments that folding models do not take, and a plan without lengths of chains."""
    for key, option in _NEVER.items():
        if getattr(arguments, key):
            raise Failure(
                f"{option} is not for folding models: they take --residues, --gpus, --sequences and --training"
            )
    if arguments.parallel != ["dict()"]:
        raise Failure("--parallel is what the plan of a folding model answers: leave it out, and give --gpus 1,2,4,8")
    if not arguments.residues:
        raise Failure("a folding model needs the lengths of chains: add --residues 512,1024,2048")
    check_file("--plot", arguments.plot, PICTURES)


def _outline_of(name: str) -> FoldingOutline:
    """Return the outline of a preset, or of a folder's model."""
    if name.startswith(PREFIX):
        from meshfold.folding import find_outline

        return find_outline(name)
    from meshfold.huggingface import outline_folding

    return outline_folding(name, f"--model {name!r}")


def _counts(text: str) -> list[int]:
    """Parse ``512,1024``: whole numbers from 1 up, in rising order."""
    try:
        found = sorted({positive(word) for word in text.split(",")})
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of whole numbers from 1 up, such as 512,1024"
        ) from None
    return found
