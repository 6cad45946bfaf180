"""A vision transformer with ViT-22B's blocks, on images it draws: LARS and LAMB at large batches, beside SGD and AdamW.

meshfold run --ranks 2 examples/vision/large_batch.py
meshfold run --ranks 2 examples/vision/large_batch.py --parallel '{"sequence": {"mode": "ring", "size": 2}}'

Each run sees the same images once. The rate of a large batch is that of the small one times the square root of the ratio of
their sizes, with a warm-up over a tenth of the steps and a cosine to zero, as in the LAMB paper (arXiv 1904.00962).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshfold.engine import Engine
from meshfold.mesh import start
from meshfold.models import ViT, build, vit_preset

CLASSES = ("disc", "square", "ring", "stripes")
SIZES: dict[str, Any] = dict(image_size=16, hidden=32, classes=len(CLASSES))
GUESS = math.log(len(CLASSES))
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": dict(lr=0.2, momentum=0.9),
    "lars": dict(lr=1.0, momentum=0.9, trust_coeff=0.01),
    "adamw": dict(lr=4e-3, weight_decay=0.01),
    "lamb": dict(lr=4e-2, weight_decay=0.01),
}
"""Rates for 32 images a batch: of three, a factor of two apart, the largest whose loss is within 5 % of the least."""


def draw(rows: int, seed: int, size: int = SIZES["image_size"]) -> dict[str, Tensor]:
    """Return a batch: ``images`` of a shape in noise, ``rows 3 size size``, and ``labels``, which of :data:`CLASSES`; the same
    on every rank."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(CLASSES), (rows,), generator=generator)
    centre = torch.rand(rows, 2, 1, 1, generator=generator) - 0.5
    line = torch.linspace(-1, 1, size)
    y, x = line[:, None] - centre[:, 0], line - centre[:, 1]
    far = (x.square() + y.square()).sqrt()
    shapes = (far < 0.5, torch.maximum(x.abs(), y.abs()) < 0.45, (far - 0.5).abs() < 0.12, (6 * (x + y)).sin() > 0)
    masks = torch.stack(shapes, 1)[torch.arange(rows), labels]
    noise = torch.randn(rows, 3, size, size, generator=generator)
    return dict(images=masks[:, None] + 0.3 * noise, labels=labels)


def factor_of(step: int, steps: int) -> float:
    """Return the factor of a step's rate."""
    warmup = max(1.0, 0.1 * steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1.0, steps - warmup)))


def train(parallel: dict[str, Any], optimizer: str, *, batch: int, small: int, samples: int, seed: int = 0) -> float:
    """Return the loss on other images after a run; what is worse than guessing, diverged runs too, counts as that.

    Args:
        parallel: any spec without pipeline.
        optimizer: one of :data:`OPTIMIZERS`.
        batch: images of a step.
        small: the batch that the optimizer's rate is for.
        samples: images of the run.
    """
    settings = OPTIMIZERS[optimizer]
    settings = {**settings, "lr": settings["lr"] * math.sqrt(batch / small), "name": optimizer}
    steps = samples // batch

    def model() -> ViT:
        return build(vit_preset("vit-22b-tiny", **SIZES))

    def schedule(of: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        return torch.optim.lr_scheduler.LambdaLR(of, lambda step: factor_of(step, steps))

    held = draw(1024, 10**6 + seed)
    with Engine(model, parallel, optimizer=settings, lr_scheduler=schedule, seed=seed) as engine:
        images = draw(samples, seed)
        for step in range(steps):
            part = {name: value[step * batch : (step + 1) * batch] for name, value in images.items()}
            if not math.isfinite(engine.train_step(engine.shard_batch(part))):
                return GUESS
        loss = engine.eval_step(engine.shard_batch(held))
    return min(loss, GUESS) if math.isfinite(loss) else GUESS


def main(argv: Sequence[str] | None = None) -> dict[str, dict[int, float]]:
    """Print the losses of every optimizer and batch, and return them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parallel", type=json.loads, default={"data": 2}, help="the spec, as JSON")
    parser.add_argument("--samples", type=int, default=8192, help="images of a run")
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 256, 1024], help="the first is the small one")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=[*OPTIMIZERS])
    args = parser.parse_args(argv)
    small = args.batches[0]
    found: dict[str, dict[int, float]] = {}
    with start() as process:
        for name in args.optimizers:
            found[name] = {
                batch: train(args.parallel, name, batch=batch, small=small, samples=args.samples)
                for batch in args.batches
            }
            shown = "  ".join(f"{batch}: {loss:.3f}" for batch, loss in found[name].items())
            if process.rank == 0:
                print(f"{name:5}  loss by batch  {shown}", flush=True)
    return found


if __name__ == "__main__":
    main()
