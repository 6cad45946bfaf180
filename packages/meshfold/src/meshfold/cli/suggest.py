"""The specs with which a model trains fastest on a machine, without a GPU and without any process.

  meshfold suggest --model llama-8b --machine h100x8 --batch-size 64 --seq-len 4096
  meshfold suggest --model llama-70b --machine h100x8 --ranks 64 --batch-size 256 --plot options.svg
  meshfold suggest --model llama-8b --machine h100x8 --batch-size 64 --explain "data=2, tensor=4"

It compares every composition that the spec allows by the clock of `meshfold plan`: tensor modes, pipelines, sequence, experts, ZeRO
stages and placements, recomputation and micro-steps. The best ones are planned in full.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from meshfold.cli.arguments import (
    PICTURES,
    Failure,
    add_model,
    check_file,
    positive,
    read_changes,
    read_model,
    read_parallel,
    read_rules,
    reason_of,
)
from meshfold.cli.machine_options import add_machine_options, chosen_machine
from meshfold.cli.train_arguments import FP8_NAMES, OPTIMIZER_NAMES


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``meshfold suggest``."""
    add_model(parser)
    parser.add_argument(
        "--machine",
        default="h200x8",
        metavar="NAME|FILE",
        help="h200x8, h100x8, a100x8, v100x8, h100, ..., or a file of meshfold calibrate (h200x8)",
    )
    parser.add_argument("--ranks", type=positive, metavar="N", help="world size (default: one node of the machine)")
    parser.add_argument("--batch-size", type=positive, required=True, metavar="N", help="sequences of a global batch")
    parser.add_argument(
        "--seq-len", type=positive, metavar="N", help="tokens of a sequence (default: the model's longest)"
    )
    parser.add_argument("--precision", default="bf16", choices=("fp32", "fp64", "bf16", "fp16"), help="(bf16)")
    parser.add_argument("--fp8", choices=FP8_NAMES, help="linear layers in fp8 by this recipe, as for plan (none)")
    parser.add_argument("--optimizer", default="adamw", choices=OPTIMIZER_NAMES, help="(adamw)")
    parser.add_argument("--no-clip", action="store_true", help="gradients are not clipped, and so none is held")
    add_machine_options(parser)
    parser.add_argument("--options", type=positive, default=2, metavar="N", help="specs to plan in full (2)")
    parser.add_argument(
        "--explain", nargs="+", metavar="SPEC", help="show what the step of this spec takes, beside the best"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw seconds against memory, with the Pareto front: .svg, .png")
    parser.add_argument("--json", action="store_true", help="print JSON, bytes and seconds as plain numbers")


def run(arguments: argparse.Namespace) -> int:
    """Run ``meshfold suggest``."""
    with _seldom_collecting():
        return _suggest(arguments)


@contextmanager
def _seldom_collecting() -> Iterator[None]:
    """Context manager: the garbage collector looks seldom. A search makes many objects; it took a seventh of the time."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def _on_one_thread() -> Iterator[None]:
    """Context manager: torch computes on one thread. Few tensors have values; others would wait for work by spinning."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _suggest(arguments: argparse.Namespace) -> int:
    read_model(arguments)
    changes, rules = read_changes(arguments.changes), read_rules(arguments.rules)
    check_file("--plot", arguments.plot, PICTURES)
    from meshfold.mesh import ParallelSpec
    from meshfold.planner import suggest
    from meshfold.planner.suggestions import (
        breakdown,
        draw_suggestion,
        explained,
        line_to_paste,
        losers_table,
        suggestion_numbers,
        suggestion_table,
    )
    from meshfold.train.model_choice import choose_model, longest

    machine = chosen_machine(arguments, arguments.machine)
    ranks = arguments.ranks or machine.devices
    asked = None if arguments.explain is None else ParallelSpec.parse(read_parallel(arguments.explain), ranks)
    seq_len = arguments.seq_len or longest(arguments.model, arguments.hf, changes)
    model = choose_model(arguments.model, arguments.hf, changes, vocab_size=None, seq_len=seq_len)
    settings: dict[str, Any] = dict(
        fp8=arguments.fp8,
        optimizer=arguments.optimizer,
        rules=rules,
        clip=not arguments.no_clip,
        name=model.name,
    )
    with _on_one_thread():
        found = suggest(
            model.build,
            machine,
            ranks=ranks,
            batch_size=arguments.batch_size,
            seq_len=seq_len,
            precision=arguments.precision,
            options=arguments.options,
            **settings,
        )
        other = None if asked is None else explained(asked, model.build, found, **settings)
    if arguments.plot is not None:
        try:
            draw_suggestion(found, arguments.plot)
        except OSError as error:
            raise Failure(reason_of(error)) from error
    if arguments.json:
        numbers = {"model": model.name, **suggestion_numbers(found)}
        if other is not None:
            numbers["explained"] = {
                "seconds": other.speed.seconds,
                "memory_bytes": other.bytes,
                "costs": other.outlook.costs(),
            }
        print(json.dumps(numbers, indent=1))
        return 0
    print(
        f"{model.name}, {arguments.batch_size} sequence{'s' * (arguments.batch_size > 1)} of {seq_len} tokens, "
        f"{arguments.precision}, on {ranks} rank{'s' * (ranks > 1)} of {machine.name}: {found.considered:,} specs compared, "
        f"{found.plans} planned in full"
    )
    parts = [suggestion_table(found), line_to_paste(found.best.candidate), losers_table(found)]
    if other is not None:
        verdict = f"it does not fit: {other.misfit.removesuffix('.')}" if other.misfit else "it fits"
        parts += [f"{asked.written}: {verdict}\n{breakdown(other, found.best)}"]  # type: ignore[union-attr]
    else:
        parts += [breakdown(found.best)]
    print("\n" + "\n\n".join(part for part in parts if part))
    return 0
