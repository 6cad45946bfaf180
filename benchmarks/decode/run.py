"""Milliseconds a generated token of a Llama of 8B's shape on one GPU: ours beside transformers with a static cache, compiled.

`meshfold bench decode` generates a text of --new tokens for each of --batch sequences, greedily, and divides its time by --new.
With --ranks 2 our model is split over two GPUs by tensor parallelism. --batch 256 --prompt 512 is many requests at once, beside
transformers' continuous batching and LMDeploy's PyTorch engine. The prompts alone are timed too, with one token after each:
*prefill*. The other tokens take the rest: *ms a token after it*.

It writes JSON as it goes, and prints the seconds of each phase. With --rounds 1 each contestant is made, measured and written
before the next. `--report FILE.json` makes the table. Column *error*: log-probs of the tokens generated in the first text,
less those of one forward of it in float32 by the same weights, the largest difference. Column *of a forward*: the same for one
forward in the model's dtype. In bfloat16 both are the rounding of activations, so they are about equal. The bound is the
bytes of the weights that a token reads, by the --bandwidth of the memory.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own

import torch

from benchmarks.common import (
    Contestant,
    add_output,
    add_rounds,
    check_contestants,
    check_out,
    parse_with_tiny,
)
from benchmarks.decode.contestants import makers
from benchmarks.decode.models import weight_bytes
from benchmarks.decode.report import JUDGED, report
from benchmarks.kernel_times import kernels_after, kernels_of, lines_of
from benchmarks.measuring import PhaseClock, measure
from benchmarks.wheels import add_wheels, unpacked
from meshfold.kernels import tried_graphs

TINY = dict(
    vocabulary=256,
    hidden=64,
    heads=4,
    kv_heads=2,
    ffn=128,
    layers=2,
    prompt=8,
    new=6,
    batch=2,
    rounds=2,
    window_s=0.0,
    settle_s=0.0,
    dtype="float32",
    backend="aot_eager",
)
PROFILED = 64
"""Tokens of a text that are profiled at most."""


def main(argv: Sequence[str]) -> int:
    """Entry point of `meshfold bench decode`."""
    parser = argparse.ArgumentParser(prog="meshfold bench decode", description=__doc__.split("\n")[0])
    for name, value in JUDGED.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--ranks", type=int, default=1, help="GPUs that share our model by tensor parallelism")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=256, help="tokens that are generated after it")
    parser.add_argument("--ahead", type=int, default=8, help="tokens computed before the host reads any")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--sums", default="packets", help="of our generator: packets, flags or collectives")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--bandwidth", type=float, default=4.24, help="TB/s that the GPU's memory reaches (H200: 4.24)")
    parser.add_argument(
        "--most-s", type=float, default=60.0, help="seconds after which a text of continuous batching is stopped"
    )
    parser.add_argument("--only", metavar="NAME,NAME", help="some contestants; see --list")
    parser.add_argument("--list", action="store_true", help="names of the contestants")
    parser.add_argument("--profile", action="store_true", help="print the time of each kernel too")
    add_rounds(parser)
    add_wheels(parser)
    add_output(parser, "decode")
    options = parse_with_tiny(parser, argv, TINY)
    if options.report is not None:
        report(options.report)
        return 0
    if options.list:
        print("\n".join(makers(options)))
        return 0
    check_contestants(parser, options.only.split(",") if options.only else (), makers(options))
    if options.ranks == 1:
        with unpacked(options.wheels):
            measure_here(options)
        report(options.out)
        return 0
    if "RANK" not in os.environ:
        check_out(options.out)
        from meshfold.mesh.processes import launch

        ended = launch([str(Path(__file__).resolve()), *argv], options.ranks)
        if not ended:
            report(options.out)
        return ended
    from meshfold.mesh.processes import process_group

    world = process_group.start()
    try:
        measure_here(options, world)
    finally:
        world.close()
    return 0


def measure_here(options: argparse.Namespace, world: Any = None) -> None:
    """Measure in this process; on several ranks each calls it, and the first one writes.

    Args:
        options: parsed arguments.
        world: the group of ranks; None for one.
    """
    check_out(options.out)
    torch._dynamo.config.recompile_limit = 64  # contestants share the code of their blocks
    prints = world is None or world.rank == 0

    def say(text: str) -> None:
        print(text, flush=True) if prints else None

    options.weight_bytes, options.forward_error, options.memory = weight_bytes(options), {}, {}
    found: list[Contestant] = []
    measure(
        "decode",
        contestants(options, found, say),
        options,
        settings=(
            *JUDGED,
            "ranks",
            "batch",
            "prompt",
            "new",
            "ahead",
            "page_size",
            "sums",
            "dtype",
            "backend",
            "bandwidth",
            "weight_bytes",
            "forward_error",
            "memory",
        ),
        world=world,
        say=say,
    )
    if options.profile:
        profile(found, options, say)


def contestants(
    options: argparse.Namespace, made: list[Contestant], say: Callable[[str], None]
) -> Iterator[Contestant]:
    """Yield those that are asked for, each after its first text; one that cannot run has the reason as its note.

    Args:
        options: parsed arguments.
        made: gets each of them.
        say: gets a line about each, with the seconds that it took to make.
    """
    wanted = options.only.split(",") if options.only else None
    for name, make in makers(options).items():
        if wanted is None or name in wanted:
            clock = PhaseClock(say)
            try:
                each = make()
                if each.step is not None and not each.warm:
                    each.step()
                    each.warm = True
            except Exception as error:  # whatever a peer raises, or ours on a machine that lacks something
                each = Contestant(name, note=reason_of(error))
            clock.ended(f"{name}: {'made, with its first text' if each.step or each.known_ms else each.note}")
            made.append(each)
            yield each


def reason_of(error: BaseException) -> str:
    """Return what an error says, on one line, with the line of generated code that it is about."""
    said = [line.strip() for line in str(error).splitlines() if line.strip()] or ["?"]
    text = f"{type(error).__name__}: {' … '.join([said[0], *said[1:][-4:]])[:900]}"
    file, line = re.search(r"/\S+\.py\b", str(error)), re.search(r"\bline (\d+)\)", str(error))
    if file is None or line is None or not Path(file[0]).is_file():
        return text
    lines, at = Path(file[0]).read_text(errors="replace").splitlines(), int(line[1])
    near = [f"{number}: {lines[number - 1]}" for number in range(max(at - 2, 1), min(at + 1, len(lines)) + 1)]
    return f"{text} … its lines {' / '.join(near)[:900]}"


def profile(contestants: Sequence[Contestant], options: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Tell the time of each kernel of a token, and how often it runs, less the prefill; of each contestant, on the GPU or not.

    Of ours a text of ``PROFILED`` tokens at most is profiled: a profiler takes long for hundreds of thousands of kernels.

    Args:
        say: gets the lines; all ranks run.
    """
    say(
        "\n".join(tried_graphs())
        or "no other graphs of a token were tried: GPUs before Hopper, or no kernels of few rows"
    )
    for each in contestants:
        if each.step is None:
            continue
        clock, first = PhaseClock(say), kernels_of(each.parts["prefill"]) if "prefill" in each.parts else []
        step: Any = each.step
        new = min(options.new, PROFILED) if first else options.new
        found = kernels_after(kernels_of(partial(step, new) if first else step), first, max(new - bool(first), 1))
        spent = [sum(ms for *_, ms in kernels) for kernels in (found, first)]
        times = [f"{ms:.4f} ms" for ms in spent]
        say(f"{each.name}: {times[0]} and {sum(calls for _, calls, _ in found):.0f} kernels a token")
        if first:
            token = ms_after(each.parts["prefill"], step, options.new)
            between = token - spent[0]  # below 0 where kernels overlap
            say(f"{each.name}: {token:.4f} ms a token unprofiled, {between:.4f} ms of it between kernels")
        say("\n".join(lines_of(found, 40)))
        say(f"{each.name}: {times[1]} of kernels in the prefill")
        say("\n".join(lines_of(first, 20)))
        clock.ended(f"{each.name}: profile")


def ms_after(prefill: Callable[[], object], step: Callable[[], object], new: int) -> float:
    """Return the milliseconds of a token after the prefill, the fastest of three texts of ``new`` tokens."""

    def seconds(run: Callable[[], object]) -> float:
        begun = time.perf_counter()
        run()  # hands out its tokens, so the GPU has ended
        return time.perf_counter() - begun

    whole, first = (min(seconds(run) for _ in range(3)) for run in (step, prefill))
    return (whole - first) / max(new - 1, 1) * 1e3


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
