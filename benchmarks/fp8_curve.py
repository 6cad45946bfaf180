"""The loss curve of a Llama of 0.5 billion parameters in fp8 beside that in bf16: 1,000 steps over the same text.

`meshfold bench fp8-curve` trains one after another, from the same weights, on the same batches, and writes JSON;
`--report FILE.json` makes the table and the plot from it. The text is the source of Python's standard library, cut into words: each
word, run of spaces, line end or other character is a token; the rarest words share one.

Two runs in bf16 that differ by rounding alone move apart, too. So bf16 is run again with each initial weight rounded to bf16, up or
down at random (``--controls``: with as many seeds): all else is the same. The distances of these control runs are what chance
makes of one rounding; the table has them beside the bars.

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that this file runs on its own

import torch
from torch import Tensor

from benchmarks.common import add_output, check_out, machine, parse_with_tiny, synchronize, write
from benchmarks.fp8 import BARS
from benchmarks.power import PowerLog
from benchmarks.reports import JOULES, joules, mean_power, met, panels, save, table
from experiments import plotting

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
SIZES = dict(hidden=1536, heads=12, kv_heads=4, ffn=4096, layers=18, words=16_384, rows=4, length=1024, steps=1000)
RULES = dict(warmup=100, held=64, window=50, settled=100, max_bytes=1 << 26)
BF16, CONTROL = "bf16", "bf16 again, weights rounded"
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
    add_output(parser, "fp8_curve")
    options = parse_with_tiny(parser, argv, TINY)
    if options.report is not None:
        report(options.report)
        return 0
    check_out(options.out)
    write(options.out, measure(options))
    report(options.out)
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the losses of all runs, with what they were measured on."""
    tokens = text(options.words, options.max_bytes)
    split = int((1 - _LAST) * len(tokens))
    batches = [*draw(options, tokens[:split], options.steps, options.rows, seed=0)]
    held = next(draw(options, tokens[split:], 1, options.held, seed=1))
    runs = {BF16: train(options, BF16, batches, held)}
    for seed in range(1, options.controls + 1):
        runs[f"{CONTROL} ({seed})"] = train(options, BF16, batches, held, rounding=seed)
    for recipe in options.recipe:
        runs[f"fp8 {recipe}"] = train(
            options, dict(name="bf16", matmul="fp8", recipe=recipe, keep=("head", "router")), batches, held
        )
    settings = {name: getattr(options, name) for name in (*SIZES, *RULES, "lr", "backend")}
    return dict(area="fp8-curve", machine=machine(), settings=settings, text_tokens=len(tokens), runs=runs)


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


def means(losses: Sequence[float], settings: Mapping[str, Any]) -> list[float]:
    """Return the mean loss of each window of steps, from the first step on; steps beyond the last whole window are left out."""
    window = settings["window"]
    return [sum(losses[at : at + window]) / window for at in range(0, len(losses) - window + 1, window)]


def distances(run: Mapping[str, Any], bf16: Mapping[str, Any], settings: Mapping[str, Any]) -> tuple[float, float, int]:
    """Return how far a run is from bf16's, relative to it: in the final loss, in the worst window, and where that begins.

    Windows that begin in the first ``settled`` steps do not count. A loss that is not finite is infinitely far.
    """
    worst, at = 0.0, settings["settled"]
    for number, (one, other) in enumerate(
        zip(means(run["losses"], settings), means(bf16["losses"], settings), strict=True)
    ):
        if number * settings["window"] >= settings["settled"] and not _apart(one, other) <= worst:
            worst, at = _apart(one, other), number * settings["window"]
    return _apart(run["final"], bf16["final"]), worst, at


def bias(run: Mapping[str, Any], bf16: Mapping[str, Any], settings: Mapping[str, Any]) -> float:
    """Return the mean loss after the first ``settled`` steps, relative to bf16's, with its sign: chance mostly cancels in it."""
    settled = settings["settled"]
    one, other = (sum(each["losses"][settled:]) for each in (run, bf16))
    return float(one / other - 1.0)


def _apart(one: float, other: float) -> float:
    found = abs(one / other - 1.0)
    return found if found == found else float("inf")


def report(path: Path) -> None:
    """Write the table and the plot beside a result, and print the table."""
    found = json.loads(path.read_text())
    settings, runs = found["settings"], found["runs"]
    bf16 = runs[BF16]
    rows, lines = [], []
    controls = [distances(run, bf16, settings) for name, run in runs.items() if name.startswith(CONTROL)]
    judged = all(settings[name] == value for name, value in {**SIZES, **RULES}.items())
    sampled, tokens = any("watts" in run for run in runs.values()), settings["rows"] * settings["length"]
    for name, run in runs.items():
        power = joules(mean_power([run]), run["step_ms"] / 1e3, tokens) if sampled else ()
        final, worst, step = distances(run, bf16, settings)
        cells = [f"{run['losses'][0]:.3f}", f"{means(run['losses'], settings)[-1]:.4f}", f"{run['final']:.4f}"]
        apart = (
            ["–"] * 3
            if run is bf16
            else [f"{final:.2%}", f"{worst:.2%} at {step:,}", f"{bias(run, bf16, settings):+.2%}"]
        )
        rows.append((name, *cells, *apart, f"{run['step_ms']:.1f}", f"{run['seconds']:.0f}", *power))
        if name != BF16 and not name.startswith(CONTROL) and judged:
            for number, (bar, value) in enumerate((("final", final), ("means", worst))):
                what = BARS[bar].what.format(name=name, step=step)
                chance = f"; bf16 again: {max(each[number] for each in controls):.2%}" if controls else ""
                lines.append(f"- {what}: {value:.2%} (bar {BARS[bar].most:.1%}{chance}): {met(BARS[bar].met(value))}")
    window = settings["window"]
    head = (
        "run",
        "loss of the first step",
        f"mean of the last {window}",
        "held-out text",
        "its distance",
        f"worst mean of {window}",
        "mean of all",
        "ms a step",
        "seconds",
        *(JOULES if sampled else ()),
    )
    lines = [
        f"Measured on: {', '.join(f'{key} {value}' for key, value in found['machine'].items() if value is not None)}.",
        "",
        f"A Llama of {bf16['parameters'] / 1e6:,.3g} million parameters ({settings['layers']} layers, hidden "
        f"{settings['hidden']:,}, ffn {settings['ffn']:,}), {settings['steps']:,} steps of {settings['rows']} × "
        f"{settings['length']:,} tokens of {found['text_tokens']:,}, AdamW at {settings['lr']:g}, compiled by "
        f"{settings['backend']}. Distances are relative to bf16; the first {settings['settled']} steps do not count in them.",
        *(
            [
                "",
                "Runs called *again* are in bf16, too, from the same weights rounded to bf16 at random, on the same batches: what "
                "chance makes of one rounding. *Mean of all*: of all losses that count, with its sign.",
            ]
            if controls
            else []
        ),
        "",
        *table(head, rows),
        "",
        *lines,
    ]
    print("\n".join(lines))
    try:
        figure = draw_curves(runs, settings)
    except ImportError:
        print("no plot: matplotlib is missing; pip install 'meshfold[plot]'", file=sys.stderr)
        path.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    else:
        save(figure, lines, path)


def draw_curves(runs: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    """Draw the mean loss of each window, and below it each run's distance from bf16, in percent.

    Raises:
        ImportError: without matplotlib.
    """
    height = 2.6
    figure, (top, bottom) = panels(2, 1, 2 * height, sharex=True)
    colours = iter((plotting.BLUE, plotting.GREEN, plotting.RED, plotting.PURPLE))
    wanted = means(runs[BF16]["losses"], settings)
    steps = [settings["window"] * (number + 1) for number in range(len(wanted))]
    ends = []
    for name, run in runs.items():
        found = means(run["losses"], settings)
        colour = plotting.GREY if name.startswith(BF16) else next(colours)
        top[0].plot(steps, found, color=colour)
        if not name.startswith(CONTROL):
            ends.append((found[-1], name, colour))
        if name != BF16:
            bottom[0].plot(
                steps, [100 * (one / other - 1) for one, other in zip(found, wanted, strict=True)], color=colour
            )
    for bound in (-100 * BARS["means"].most, 100 * BARS["means"].most):
        bottom[0].axhline(bound, linestyle=":", color=plotting.RED)
    bottom[0].axvline(settings["settled"], linestyle=":", color=plotting.GREY)
    top[0].set(title=f"Mean loss of {settings['window']} steps")
    bottom[0].set(title="Distance from bf16 in percent; grey: bf16 again; red: the bar", xlabel="step")
    plotting.name_lines(top[0], height, ends)
    return figure


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
