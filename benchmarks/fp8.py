"""Blocks of Llama in fp8, forward and backward: our recipes beside our bf16 and torchao's recipes, all compiled.

`meshfold bench fp8` times all in rounds, after clocks have settled, with the power that each draws. It writes JSON;
`--report FILE.json` makes the table from it. The gradients of each are compared with those of bf16, weight by weight. All have the
same weights in memory, and no float32 masters: eight models of eight blocks take what one does.

*Inductor casts* is a recipe of ours without our kernels in compiled code; in the others they cast dy and transposed operands.
With ``--backend none`` *casts apart* takes its place: each product casts its own operands, and no norm or activation writes one.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that this file runs on its own

import torch
from torch import Tensor, nn

from benchmarks.common import (
    Contestant,
    add_output,
    add_rounds,
    check_out,
    median,
    parse_with_tiny,
    ratios,
)
from benchmarks.measuring import measure
from benchmarks.reports import ratio, read_bars, table

TINY = dict(
    hidden=64,
    heads=4,
    kv_heads=2,
    ffn=128,
    blocks=2,
    rows=2,
    length=16,
    backend="aot_eager",
    rounds=2,
    window_s=0.0,
    settle_s=0.0,
)
BF16, OURS, TORCHAO = "ours, bf16", "ours, fp8", "torchao"
RECIPES = ("rowwise_hp_dw", "rowwise", "tensorwise")
INDUCTOR, APART = "rowwise, Inductor casts", "rowwise, casts apart"
THEIR_RECIPES = dict(zip(RECIPES, ("rowwise_with_gw_hp", "rowwise", "tensorwise"), strict=True))
BARS = read_bars("fp8", ("bf16", "torchao", "final", "means"))  # the last two are of fp8_curve.py
JUDGED = dict(hidden=4096, heads=32, kv_heads=8, ffn=14336, blocks=8)
"""The blocks that the bars are for; at 16,384 tokens."""
WORDS = 1024
"""A small vocabulary: what is measured are the blocks."""


def main(argv: Sequence[str]) -> int:
    """Entry point of `meshfold bench fp8`."""
    parser = argparse.ArgumentParser(prog="meshfold bench fp8", description=__doc__.split("\n")[0])
    for name, value in JUDGED.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--rows", type=int, default=4, help="sequences")
    parser.add_argument("--length", type=int, default=4096, help="tokens of each")
    parser.add_argument("--backend", default="inductor", help="of torch.compile; 'none' compiles nothing")
    parser.add_argument(
        "--only",
        nargs="*",
        default=[],
        help="names of contestants, or beginnings of several names; our bf16 always takes part",
    )
    add_rounds(parser)
    add_output(parser, "fp8")
    options = parse_with_tiny(parser, argv, TINY)
    if options.report is not None:
        report(options.report)
        return 0
    check_out(options.out)
    torch._dynamo.config.recompile_limit = 64  # contestants share the code of their blocks
    begun = time.perf_counter()
    with ExitStack() as opened:
        found = [*contestants(options, opened)]
        print(f"{len(found)} models after {time.perf_counter() - begun:.0f} s", flush=True)
        compare(found)
        settings = (*JUDGED, "rows", "length", "backend", "window_s")
        measure("fp8", found, options, settings, packages=("torchao",))
    report(options.out)
    return 0


def contestants(options: argparse.Namespace, opened: ExitStack) -> Iterator[Contestant]:
    """Yield all, each with a model of its own of the same weights, on the same tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(WORDS, (options.rows, options.length), generator=generator)
    weights: dict[str, Tensor] = {}
    yield Contestant(BF16, step_of(engine_model(options, opened, "bf16", weights), ids))
    ours = (*RECIPES, APART if options.backend == "none" else INDUCTOR)
    names = [f"{who} {recipe}" for who, recipes in ((OURS, ours), (TORCHAO, RECIPES)) for recipe in recipes]
    for name in chosen(names, options.only):
        recipe = name.removeprefix(OURS).removeprefix(TORCHAO).strip()
        if name.startswith(OURS):
            precision = dict(name="bf16", matmul="fp8", recipe=recipe.partition(",")[0])
            step = step_of(engine_model(options, opened, precision, weights), ids)
            yield Contestant(name, partial(WAYS[recipe], step) if recipe in WAYS else step)
            continue
        try:
            yield Contestant(name, step_of(torchao_model(options, opened, recipe, weights), ids))
        except ImportError as error:
            yield Contestant(name, note=f"{error}: pip install torchao==0.18.0")


def chosen(names: Sequence[str], only: Sequence[str]) -> list[str]:
    """Return the names that are wanted: those given whole, and all that begin with another word; without words all."""
    whole, beginnings = [word for word in only if word in names], [word for word in only if word not in names]
    return [name for name in names if not only or name in whole or name.startswith(tuple(beginnings))]


def by_inductor(step: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Take a step whose compiled code has none of our kernels."""
    from meshfold import kernels

    with kernels.use("reference"):
        return step()


def with_casts_apart(step: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Take a step in which each product casts its own operands."""
    from meshfold.kernels import casts_apart

    with casts_apart():
        return step()


WAYS = {INDUCTOR: by_inductor, APART: with_casts_apart}
"""Steps of contestants that are no recipes of their own."""


def engine_model(
    options: argparse.Namespace,
    opened: ExitStack,
    precision: object,
    weights: dict[str, Tensor],
    *,
    compiled: bool = True,
) -> nn.Module:
    """Return blocks of Llama in an engine, which puts fp8 and compiled code in place.

    ``weights``: those of the models before, by name, which this one shares; the first fills it in.
    """
    from meshfold.engine import Engine
    from meshfold.models import LlamaConfig, build

    config = LlamaConfig(
        vocab_size=WORDS,
        hidden=options.hidden,
        layers=options.blocks,
        heads=options.heads,
        kv_heads=options.kv_heads,
        ffn=options.ffn,
        max_positions=options.length,
    )
    compile = dict(backend=options.backend) if compiled and options.backend != "none" else False
    engine = opened.enter_context(Engine(lambda: build(config), precision=precision, compile=compile))
    model: nn.Module = engine.model
    masters = engine.states.masters  # type: ignore[attr-defined]
    for name, parameter in model.named_parameters():
        masters.of(parameter).data = parameter.new_empty(0)  # nothing is stepped
        parameter.data = weights.setdefault(name, parameter.data)
    return model.train()


def torchao_model(options: argparse.Namespace, opened: ExitStack, recipe: str, weights: dict[str, Tensor]) -> nn.Module:
    """Return the same blocks with torchao's linear layers, each block compiled.

    Raises:
        ImportError: if torchao is not there.
    """
    float8 = importlib.import_module("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name(THEIR_RECIPES[recipe])
    if not torch.cuda.is_available():
        object.__setattr__(config, "emulate", True)
    model = engine_model(options, opened, "bf16", weights, compiled=False)
    float8.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != "head")
    for block in model.blocks if options.backend != "none" else ():  # type: ignore[union-attr]
        block.compile(backend=options.backend)
    return model


def step_of(model: nn.Module, ids: Tensor) -> Callable[[], dict[str, Tensor]]:
    """Return a forward and backward: gradients of every weight, by name."""
    ids = ids.to(next(model.parameters()).device)
    names, parameters = zip(*model.named_parameters(), strict=True)

    def step() -> dict[str, Tensor]:
        loss = model(input_ids=ids, labels=ids).loss
        return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))

    return step


def compare(found: Sequence[Contestant]) -> None:
    """Note for each contestant how far the direction of a gradient is from bf16's: 1 − cosine of the worst weight."""
    wanted: dict[str, Tensor] = found[0].step()  # type: ignore[misc]
    for each in found:
        if each.step is not None:
            begun = time.perf_counter()
            got = each.step()
            print(f"{each.name}: first step after {time.perf_counter() - begun:.0f} s", flush=True)
            each.error = max(
                1.0 - float(torch.cosine_similarity(got[name].flatten().float(), want.flatten().float(), dim=0))
                for name, want in wanted.items()
            )


def report(path: Path) -> None:
    """Write the table beside a result, and print it."""
    found = json.loads(path.read_text())
    settings, times = found["settings"], found["milliseconds"]
    tokens = settings["rows"] * settings["length"]
    rows = []
    for name, values in times.items():
        power, gib = found["power"][name], found["peak_bytes"][name] / 2**30
        joules = power["watts"] * median(values) / 1e3 if power else 0.0
        rows.append(
            (
                name,
                f"{median(values):.1f} ({min(values):.1f}–{max(values):.1f})",
                ratio(values, times[BF16]),
                f"{gib:.1f}" if gib else "–",
                f"{joules:.1f}" if power else "–",
                f"{joules * 1e3 / tokens:.2f}" if power else "–",
                f"{power['watts']:.0f}" if power else "–",
                f"{power['mhz']:.0f}" if power else "–",
                f"{found['error'][name]:.1e}",
                found["notes"].get(name, ""),
            )
        )
    rows += [(name, *["–"] * 8, note) for name, note in found["notes"].items() if name not in times]
    head = ("contestant", "ms", "bf16 ÷ this", "GiB", "J a step", "mJ a token", "W", "MHz", "1 − cosine", "note")
    lines = [
        f"Measured on: {', '.join(f'{key} {value}' for key, value in found['machine'].items() if value is not None)}.",
        "",
        f"{settings['blocks']} blocks, hidden {settings['hidden']:,}, heads {settings['heads']} and {settings['kv_heads']}, ffn "
        f"{settings['ffn']:,}, {settings['rows']} × {settings['length']:,} tokens, forward and backward, compiled by "
        f"{settings['backend']}. Median of the rounds, with the lowest and the highest. 1 − cosine: of the gradient of the "
        "worst weight with bf16's.",
        "",
        *table(head, rows),
        "",
    ]
    judged = settings["backend"] != "none" and tokens == 16_384
    if judged and all(settings[name] == value for name, value in JUDGED.items()):
        best = fastest(times, OURS)
        theirs = fastest(times, TORCHAO)
        lines.append(BARS["bf16"].line(ratios(times[best], times[BF16])[0], 1, best=best))
        if theirs:
            lines.append(BARS["torchao"].line(ratios(times[best], times[theirs])[0], 1, best=best))
    path.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


def fastest(times: dict[str, list[float]], who: str) -> str:
    """Return the name of the fastest of somebody's contestants; empty if none ran."""
    return min((name for name in times if name.startswith(who)), key=lambda name: median(times[name]), default="")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
