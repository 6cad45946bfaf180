"""One layer on one GPU, forward and backward: our mixture, transformers' block, a dense layer with as many active parameters."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import Contestant, add_output, add_rounds, check_out, median, parse_with_tiny
from benchmarks.experts.run import add_case
from benchmarks.kernel_times import kernels_of, lines_of
from benchmarks.measuring import measure
from benchmarks.reports import met, ratio, read_bars, table

TINY = dict(
    hidden=32,
    experts=8,
    top_k=2,
    ffn=16,
    tokens=64,
    dtype="float32",
    backend="aot_eager",
    rounds=2,
    window_s=0.0,
    settle_s=0.0,
)
JUDGED = dict(hidden=2048, experts=128, top_k=8, ffn=768, tokens=16_384, dtype="bfloat16")
"""The layer that the bar is for."""
OURS, DENSE, TRANSFORMERS = "ours", "dense", "transformers"
BARS = read_bars("experts", ("dense", "transformers", "torchtitan", "memory"))


def main(argv: Sequence[str]) -> int:
    """Time a layer."""
    parser = argparse.ArgumentParser(prog="meshfold bench experts --case layer", description=__doc__.split("\n")[0])
    add_case(parser)
    parser.add_argument("--hidden", type=int, default=2048, help="size of a token")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8, help="experts of a token")
    parser.add_argument(
        "--ffn", type=int, default=768, help="inner size of an expert; the dense layer has top-k times this"
    )
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--profile", action="store_true", help="print a step of ours by kernels")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    add_rounds(parser)
    parser.set_defaults(rounds=4, window_s=1.8)
    add_output(parser, "experts_layer")
    options = parse_with_tiny(parser, argv, TINY)
    if options.report is not None:
        report(options.report)
        return 0
    check_out(options.out)
    found = contestants(options)
    measure("experts, a layer", found, options, settings=(*JUDGED, "backend", "window_s"))
    report(options.out)
    if options.profile and found[0].step is not None:
        print("\n".join(lines_of(kernels_of(found[0].step))))
    return 0


def contestants(options: argparse.Namespace) -> list[Contestant]:
    """Return all, on the same tokens; the error is that of dx against the eager contestant of the same layer."""
    from meshfold.experts import MixtureOfExperts, SharedExpert

    device, dtype = "cuda" if torch.cuda.is_available() else "cpu", getattr(torch, options.dtype)
    torch.manual_seed(0)
    with torch.device(device):
        mixture = MixtureOfExperts(options.hidden, options.ffn, options.experts, options.top_k).to(dtype)
        dense = SharedExpert(options.hidden, options.top_k * options.ffn).to(dtype)
        x = torch.randn(1, options.tokens, options.hidden, dtype=dtype, requires_grad=True)
        grad = torch.randn_like(x)
    found = [Contestant(OURS, step_of(mixture, x, grad)), Contestant(DENSE, step_of(dense, x, grad))]
    for name, layer in ((OURS, mixture), (DENSE, dense)):
        found.append(compiled(f"{name}, compiled", layer, options.backend, x, grad))
    try:
        found.append(Contestant(TRANSFORMERS, step_of(transformers_block(options, mixture), x, grad)))
    except (ImportError, AttributeError) as error:
        found.append(Contestant(TRANSFORMERS, note=f"{type(error).__name__}: {error}"))
    wanted = {name: step() for name, step in ((OURS, found[0].step), (DENSE, found[1].step)) if step is not None}
    for each in found:
        if each.step is not None:
            want = wanted[DENSE if each.name.startswith(DENSE) else OURS][0].float()
            each.error = float((each.step()[0].float() - want).norm() / want.norm())
    return found


def step_of(layer: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """Return a forward and backward: the gradients of the tokens and of every weight."""
    assert isinstance(layer, nn.Module)
    leaves = (x, *layer.parameters())
    return lambda: torch.autograd.grad(layer(x), leaves, grad)


def compiled(name: str, layer: nn.Module, backend: str, x: Tensor, grad: Tensor) -> Contestant:
    """Return the same layer, compiled; a note where the compiler fails."""
    step = step_of(torch.compile(layer, backend=backend), x, grad)
    try:
        step()
    except Exception as error:  # whatever the compiler raises: the contestant does not run, and its row says why
        return Contestant(name, note=f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}")
    return Contestant(name, step)


def transformers_block(options: argparse.Namespace, ours: nn.Module) -> nn.Module:
    """Return transformers' block of Qwen3-MoE with our weights and its own grouped matmuls.

    Raises:
        ImportError, AttributeError: if transformers is not there, or is one without stacked experts.
    """
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=options.hidden,
        moe_intermediate_size=options.ffn,
        num_experts=options.experts,
        num_experts_per_tok=options.top_k,
        norm_topk_prob=True,
    )
    config._experts_implementation = "grouped_mm"
    block: nn.Module = Qwen3MoeSparseMoeBlock(config)
    weights = {
        "gate.weight": "router.weight",
        "experts.gate_up_proj": "experts.gate_up",
        "experts.down_proj": "experts.down",
    }
    for name, mine in weights.items():
        module = block.get_submodule(name.rpartition(".")[0])
        setattr(module, name.rpartition(".")[2], ours.get_parameter(mine))
    return block


def report(path: Path) -> None:
    """Write the table beside a result, and print it."""
    found = json.loads(path.read_text())
    settings, times = found["settings"], found["milliseconds"]
    # Forward and backward of the matmuls of the active parameters: 6 operations an element.
    flops = 6 * 3 * settings["hidden"] * settings["top_k"] * settings["ffn"] * settings["tokens"]
    rows = [_row(name, values, found, flops) for name, values in times.items()]
    rows += [(name, *["–"] * 8, note) for name, note in found["notes"].items() if name not in times]
    head = ("contestant", "ms", "dense ÷ this", "TFLOP/s", "GiB", "J a step", "mJ a token", "W", "MHz", "error", "note")
    lines = [
        f"Measured on: {', '.join(f'{key} {value}' for key, value in found['machine'].items() if value is not None)}.",
        "",
        f"A layer of {settings['experts']} experts of {settings['hidden']:,} → {settings['ffn']:,}, top {settings['top_k']}, "
        f"beside a dense one of {settings['hidden']:,} → {settings['top_k'] * settings['ffn']:,}: {settings['tokens']:,} tokens, "
        f"{settings['dtype']}, forward and backward. Median of the rounds, with the lowest and the highest. Error: of the tokens' "
        "gradient, against the same layer not compiled.",
        "",
        *table(head, rows),
        "",
    ]
    if all(settings[name] == value for name, value in JUDGED.items()):
        value, bar = best(times, OURS) / best(times, DENSE), BARS["dense"]
        lines.append(f"- {bar.what}: {value:.3f} (bar {bar.most:g}): {met(bar.met(value))}")
    path.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


def _row(name: str, values: list[float], found: dict[str, Any], flops: float) -> tuple[str, ...]:
    power, gib = found["power"][name], found["peak_bytes"][name] / 2**30
    joules = power["watts"] * median(values) / 1e3 if power else 0.0
    return (
        name,
        f"{median(values):.2f} ({min(values):.2f}–{max(values):.2f})",
        ratio(values, found["milliseconds"][DENSE]),
        f"{flops / median(values) / 1e9:.0f}",
        f"{gib:.2f}" if gib else "–",
        f"{joules:.2f}" if power else "–",
        f"{joules * 1e3 / found['settings']['tokens']:.3f}" if power else "–",
        f"{power['watts']:.0f}" if power else "–",
        f"{power['mhz']:.0f}" if power else "–",
        f"{found['error'][name]:.1e}",
        found["notes"].get(name, ""),
    )


def best(times: dict[str, list[float]], who: str) -> float:
    """Return the milliseconds of somebody's fastest contestant."""
    return min(median(values) for name, values in times.items() if name.partition(",")[0] == who)
