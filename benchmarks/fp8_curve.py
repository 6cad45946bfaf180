"""The loss curve of a Llama of 0.5 billion parameters in fp8 beside that in bf16: 1,000 steps over the same text.

`meshfold bench fp8-curve` trains one after another, from the same weights, on the same batches, and writes JSON;
`--report FILE.json` makes the table and the plot from it. The text is the source of Python's standard library, cut into words: each
word, run of spaces, line end or other character is a token; the rarest words share one.

Two runs in bf16 that differ by rounding alone move apart, too. So bf16 is run again with each initial weight rounded to bf16, up or
down at random (``--controls``: with as many seeds): all else is the same. The distances of these control runs are what chance
makes of one rounding; the table has them beside the bars.

One run cannot tell distances that are smaller than chance. With ``--repeats N`` each precision is run N times, each time from
weights rounded in another way, and the verdicts are on the means of all runs. Processes can share the work: each makes some of the
repeats (``--only 0 4 8``) and writes a file of its own, and ``--report PART.json PART.json --out ALL.json`` puts these together.

A step of 4 × 1,024 tokens is 6 × 0.48 billion × 4,096 + attention = 12.4 TFLOP, 36 ms at 350 TFLOP/s, and about 6 ms of AdamW over
0.5 billion float32 weights. On one H100 1,000 steps took 83 s in bf16 and 96 s in fp8: with two control runs about six minutes.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that this file runs on its own

import torch
from torch import Tensor

from benchmarks.common import RESULTS, check_out, machine, parse_with_tiny, synchronize, write
from benchmarks.fp8_curve_report import BF16, RULES, SIZES, name_of, report, rounding_of
from benchmarks.power import PowerLog

TINY = dict(
    hidden=64,
    heads=4,
    kv_heads=2,
    ffn=128,
    layers=1,
    words=512,
    rows=4,
    length=32,
    steps=60,
    warmup=10,
    held=16,
    lr=3e-3,
    window=10,
    settled=20,
    backend="aot_eager",
    max_bytes=1 << 18,
)
_LAST = 0.05  # of the text, held out
_WORD = re.compile(r"[A-Za-z]+| +|.|\n")
_SKIPPED = ("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data")
RECIPES = ("rowwise", "rowwise_hp_dw", "tensorwise", "block128")


def main(argv: Sequence[str]) -> int:
    """Entry point of `meshfold bench fp8-curve`."""
    parser = argparse.ArgumentParser(prog="meshfold bench fp8-curve", description=__doc__.split("\n")[0])
    for name, value in {**SIZES, **RULES}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=3e-4, help="highest rate of AdamW; it falls by a cosine to a tenth")
    parser.add_argument("--recipe", nargs="+", choices=RECIPES, default=["rowwise"], help="of fp8, beside bf16")
    parser.add_argument(
        "--controls", type=int, default=2, help="runs in bf16 whose initial weights are rounded at random"
    )
    parser.add_argument("--backend", default="inductor", help="of torch.compile; 'none' compiles nothing")
    parser.add_argument(
        "--repeats", type=int, default=1, help="runs of each precision, each from weights rounded in another way"
    )
    parser.add_argument("--only", type=int, nargs="+", metavar="REPEAT", help="some of the repeats, counted from 0")
    parser.add_argument("--out", type=Path, default=RESULTS / "fp8_curve.json")
    parser.add_argument(
        "--report", type=Path, nargs="+", help="make table and plot from these JSON files instead of measuring"
    )
    options = parse_with_tiny(parser, argv, TINY)
    if options.repeats < 1 or not {*(options.only or ())} <= {*range(options.repeats)}:
        parser.error(
            f"--repeats {options.repeats} with --only {options.only}: name repeats from 0 to {options.repeats - 1}"
        )
    if options.report is not None:
        if len(options.report) > 1:
            check_out(options.out)
            write(options.out, merged(options.report))
        report(options.out if len(options.report) > 1 else options.report[0])
        return 0
    check_out(options.out)
    for found in measure(options):
        write(options.out, found)
    report(options.out)
    return 0


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the losses of all runs until now, with what they were measured on, after each run."""
    tokens = text(options.words, options.max_bytes)
    split = int((1 - _LAST) * len(tokens))
    batches = [*draw(options, tokens[:split], options.steps, options.rows, seed=0)]
    held = next(draw(options, tokens[split:], 1, options.held, seed=1))
    settings = {name: getattr(options, name) for name in (*SIZES, *RULES, "lr", "backend")}
    about = dict(area="fp8-curve", machine=machine(), settings=settings, text_tokens=len(tokens))
    runs: dict[str, Any] = {}
    for name, precision, rounding in planned(options):
        runs[name] = train(options, precision, batches, held, rounding=rounding)
        yield about | dict(runs=runs)


def planned(options: argparse.Namespace) -> list[tuple[str, object, int]]:
    """Return name, precision and rounding of each run, in order: pair by pair, and the other controls last."""
    repeats = range(options.repeats) if options.only is None else options.only
    controls = range(options.repeats, options.controls + 1) if options.only is None else ()
    recipes = {
        f"fp8 {each}": dict(name="bf16", matmul="fp8", recipe=each, keep=("head", "router")) for each in options.recipe
    }
    pairs = [(name, precision, seed) for seed in repeats for name, precision in ((BF16, BF16), *recipes.items())]
    return [
        (name_of(name, seed), precision, seed)
        for name, precision, seed in (*pairs, *((BF16, BF16, seed) for seed in controls))
    ]


def merged(paths: Sequence[Path]) -> dict[str, Any]:
    """Return the runs of several files as of one, in the order of their roundings.

    Raises:
        Failure: if the files are of other settings, machines or texts, or two have the same run.
    """
    from meshfold.cli.arguments import Failure

    parts = [json.loads(path.read_text()) for path in paths]
    first, runs = parts[0], dict[str, Any]()
    for path, part in zip(paths, parts, strict=True):
        for key in ("settings", "machine", "text_tokens"):
            if part[key] != first[key]:
                raise Failure(f"--report {path}: has other {key} than {paths[0]}: name files of one measurement")
        if twice := sorted({*runs} & {*part["runs"]}):
            raise Failure(f"--report {path}: run '{twice[0]}' is in a file before it, too: name each part once")
        runs |= part["runs"]
    order = sorted(runs, key=lambda name: (not name.startswith(BF16), name.partition(" again")[0], rounding_of(name)))
    return {**first, "runs": {name: runs[name] for name in order}}


def text(words: int, max_bytes: int) -> Tensor:
    """Return the source of Python's standard library as numbers below ``words``; the rarest words are all ``words - 1``."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(folder.rglob("*.py")) if not set(path.relative_to(folder).parts) & set(_SKIPPED)]
    found: list[str] = []
    for path in files:
        found += _WORD.findall(path.read_text("ascii", "ignore"))
        max_bytes -= path.stat().st_size
        if max_bytes <= 0:
            break
    ranked = sorted(Counter(found).items(), key=lambda pair: (-pair[1], pair[0]))[: words - 1]
    numbers = {word: number for number, (word, _) in enumerate(ranked)}
    return torch.tensor([numbers.get(word, words - 1) for word in found])


def draw(options: argparse.Namespace, tokens: Tensor, count: int, rows: int, *, seed: int) -> Iterator[Tensor]:
    """Yield batches of sequences that begin anywhere in the text, ``rows length`` each."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(len(tokens) - options.length, (rows, 1), generator=generator)
        yield tokens[starts + torch.arange(options.length)]


def rounded(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Round float32 numbers to bf16, up or down at random: the mean is the number. The result is float32 again."""
    bits = weight.float().contiguous().view(torch.int32)
    noise = torch.randint(1 << 16, bits.shape, generator=generator, dtype=torch.int32)
    return ((bits + noise) & -(1 << 16)).view(torch.float32)


def train(
    options: argparse.Namespace, precision: object, batches: Sequence[Tensor], held: Tensor, *, rounding: int = 0
) -> dict[str, Any]:
    """Train from seeded weights. Return the loss of each step, that on held-out text after the last, the times, and the
    mean watts and MHz behind the first ``settled`` steps where they were sampled.

    ``rounding``: seed by which the initial weights are :func:`rounded`; 0: they are not.
    """
    from meshfold.engine import Engine
    from meshfold.models import LlamaConfig, build
    from meshfold.train.schedule import lr_schedule

    config = LlamaConfig(
        vocab_size=options.words,
        hidden=options.hidden,
        layers=options.layers,
        heads=options.heads,
        kv_heads=options.kv_heads,
        ffn=options.ffn,
        max_positions=options.length,
    )
    torch._dynamo.reset()
    optimizer = dict(name="adamw", lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    engine = Engine(
        lambda: build(config),
        optimizer=optimizer,
        precision=precision,
        clip_grad_norm=1.0,
        lr_scheduler=lr_schedule("cosine", warmup=options.warmup, steps=options.steps),
        compile=False if options.backend == "none" else dict(backend=options.backend),
    )
    with engine:
        if rounding:
            generator = torch.Generator().manual_seed(rounding)
            weights = {name: rounded(value.cpu(), generator) for name, value in engine.full_state_dict().items()}
            engine.load_state_dict(weights)
        losses: list[Tensor] = []
        times: list[float] = []
        with PowerLog() as power:
            warm_at = time.time()
            for ids in batches:
                begun = time.perf_counter()
                engine.run_step(dict(input_ids=ids, labels=ids))
                losses.append(engine.runner.loss.detach().clone())
                if len(losses) % options.window == 0:
                    synchronize()
                times.append(time.perf_counter() - begun)
                if len(losses) == options.settled:
                    warm_at = time.time()
            synchronize()
            ended = time.time()
        rows = [dict(input_ids=ids, labels=ids) for ids in held.split(options.rows)]
        final = sum(engine.eval_step(each) * len(each["input_ids"]) for each in rows) / len(held)
        return dict(
            losses=torch.stack(losses).double().tolist(),
            final=final,
            **power.mean(warm_at, ended, 1),
            seconds=sum(times),
            step_ms=1e3 * sum(times[-options.window :]) / len(times[-options.window :]),
            layers=str(engine.fp8_layers),
            parameters=config.num_parameters(),
        )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
