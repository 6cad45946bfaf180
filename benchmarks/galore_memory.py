"""GaLore with 8-bit moments trains a Llama of 7B in 24 GiB of one GPU, without the host: memory, losses and seconds.

Weights are in bfloat16 without masters, blocks are recomputed, and parameters are stepped inside the backward, as the paper does.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.common import RESULTS, Contestant, energy_windows, machine, median, synchronize, write
from benchmarks.reports import JOULES, Bar, joules, met

SHAPE = dict(hidden=4096, layers=32, heads=32, kv_heads=32, ffn=11008, words=32_000, rows=1, length=2048, rank=1024)
"""That of Llama 7B, which the bar is for."""
TINY = dict(hidden=64, layers=2, heads=4, kv_heads=4, ffn=160, words=128, rows=1, length=16, rank=16)
OUT = RESULTS / "galore.json"
OTHERS_RATE = 0.1  # of embeddings, head and norms, times that of matrices


def run(options: argparse.Namespace, bar: Bar) -> None:
    """Train a few steps on one batch under a limit of memory, and write the result and its report."""
    from meshfold.models import LlamaConfig, build
    from meshfold.optimizers import GaLoreAdamW, role_groups, step_in_backward

    shape = TINY if options.tiny else SHAPE
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.limit_gib * 2**30 / total))
    config = LlamaConfig(
        vocab_size=shape["words"],
        hidden=shape["hidden"],
        layers=shape["layers"],
        heads=shape["heads"],
        kv_heads=shape["kv_heads"],
        ffn=shape["ffn"],
        max_positions=shape["length"],
    )
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model: Any = build(config).train()
    finally:
        torch.set_default_dtype(torch.float32)
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    settings: dict[str, Any] = dict(rank=options.rank or shape["rank"], projection="randomized", eight_bit=True)
    optimizer = GaLoreAdamW(role_groups(model), lr=options.lr, **settings)
    for group in optimizer.param_groups:
        group["lr"] *= 1.0 if group["role"] == "matrices" else OTHERS_RATE
    step_in_backward(optimizer)
    ids = torch.randint(shape["words"], (shape["rows"], shape["length"]), device=device)

    def train() -> float:
        loss = model(input_ids=ids, labels=ids).loss
        value = float(loss.item())
        loss.backward()
        return value

    losses, seconds = [], []
    for step in range(options.steps):
        begun = time.perf_counter()
        losses.append(train())
        synchronize()
        seconds.append(time.perf_counter() - begun)
        print(f"step {step}: loss {losses[-1]:.3f}, {seconds[-1]:.2f} s", flush=True)
    kept = [value for state in optimizer.state.values() for value in state.values()]
    result: dict[str, Any] = dict(
        area="galore",
        machine=machine(),
        settings={**shape, **settings, "lr": options.lr, "limit_gib": options.limit_gib},
        parameters=sum(p.numel() for p in model.parameters()),
        losses=losses,
        seconds=seconds,
        weight_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        state_bytes=sum(one.numel() * one.element_size() for one in kept),
        eight_bit_bytes=sum(one.numel() for one in kept if one.dtype == torch.uint8),
        peak_bytes=torch.cuda.max_memory_allocated() if on_gpu else 0,
        reserved_bytes=torch.cuda.max_memory_reserved() if on_gpu else 0,
        power=energy_windows(
            [Contestant("GaLore", train, warm=True)],
            ranks=1,
            gpus=1,
            window_s=options.window_s,
            settle_s=options.settle_s,
        ).get("GaLore", {}),
    )
    write(options.out, result)
    report(options.out, bar)


def report(path: Path, bar: Bar) -> None:
    """Write the lines beside a result, and print them."""
    found = json.loads(path.read_text())
    settings, losses, seconds = found["settings"], found["losses"], found["seconds"]
    gib = {name: found[f"{name}_bytes"] / 2**30 for name in ("weight", "state", "eight_bit", "peak", "reserved")}
    lines = [
        f"Measured on: {', '.join(f'{key} {value}' for key, value in found['machine'].items() if value is not None)}.",
        "",
        f"{found['parameters'] / 1e9:.2f} billion parameters in bfloat16, GaLore of rank {settings['rank']} with 8-bit moments, "
        f"{settings['rows']} × {settings['length']:,} tokens, blocks recomputed, steps inside the backward.",
        "",
        f"- losses on one batch: {', '.join(f'{loss:.3f}' for loss in losses)}",
        f"- seconds a step: {median(seconds[1:] or seconds):.2f}; the first, with projections: {seconds[0]:.1f}",
        f"- GiB: weights {gib['weight']:.2f}, optimizer state {gib['state']:.2f}, of which {gib['eight_bit']:.2f} in 8 bits",
    ]
    if power := found.get("power"):
        cells = joules(power, power["milliseconds"] / 1e3, settings["rows"] * settings["length"])
        said = ", ".join(f"{cell} {head}" for cell, head in zip(cells, JOULES, strict=True))
        lines.append(f"- when clocks have settled: {power['milliseconds'] / 1e3:.2f} s a step, {said}")
    if gib["peak"]:
        lines.append(
            f"- peak GiB: {gib['peak']:.2f} allocated, {gib['reserved']:.2f} reserved, under a limit of {settings['limit_gib']:g}"
        )
        if all(settings[name] == value for name, value in SHAPE.items() if name != "rank"):
            # Towards zero the loss of one batch moves by rounding alone.
            falls = all(after <= before + 0.001 * losses[0] for before, after in pairwise(losses))
            trains = bar.met(gib["reserved"]) and falls
            lines.append(f"- {bar.what}: {gib['reserved']:.2f} (bar {bar.most:g}): {met(trains)}")
    path.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
