"""A small GPT on Python's own source, by optimizers at a small batch and at large ones, over the same samples.

The rate of a large batch is that of the small one times the square root of the ratio of their sizes, as in the LAMB paper
(You et al. 2019, arXiv 1904.00962). Every run warms up over a tenth of its steps and falls to zero. One process, one thread.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshfold.kernels import LAYERWISE
from meshfold.models import GPT, GPTConfig
from meshfold.optimizers import Lamb, Lars, NormOptimizer

LETTERS = 128  # ASCII
GUESS = math.log(LETTERS)
WARMUP = 0.1  # of all steps
NEAR = 1e-3  # of two rates whose losses are so near the smaller one is taken: it is scaled up yet


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Sizes of an experiment.

    Attributes:
        samples: sequences that every run sees, each of them once.
        length: characters of one.
        small: the batch for which rates are tried.
        large: the batches that the best one is scaled to.
        hidden, layers: of the model.
        held: sequences of the text's last tenth, to evaluate with.
        micro: sequences of a micro-step at most, which changes nothing but memory.
    """

    samples: int = 65536
    length: int = 16
    small: int = 32
    large: tuple[int, ...] = (256, 1024, 8192)
    hidden: int = 32
    layers: int = 1
    held: int = 2048
    micro: int = 512


@dataclass(frozen=True, kw_only=True)
class Method:
    """An optimizer, and the rates that are tried at the small batch.

    Attributes:
        make: from parameters and a rate.
        rates: ascending.
    """

    make: Callable[..., torch.optim.Optimizer]
    rates: Sequence[float]


METHODS: dict[str, Method] = {
    "SGD": Method(make=partial(torch.optim.SGD, momentum=0.9), rates=(0.1, 0.2, 0.4)),
    "LARS": Method(make=partial(Lars, momentum=0.9, trust_coeff=0.01), rates=(1.0, 2.0, 4.0)),
    "AdamW": Method(make=partial(torch.optim.AdamW, weight_decay=0.01, fused=True), rates=(0.005, 0.01, 0.02)),
    "LAMB": Method(make=partial(Lamb, weight_decay=0.01), rates=(0.01, 0.02, 0.04)),
}


@cache
def letters() -> Tensor:
    """Return the source of the standard library's modules as numbers, in the order of their names."""
    folder = Path(sysconfig.get_path("stdlib"))
    found = "".join(path.read_text("ascii", "ignore") for path in sorted(folder.glob("*.py")))
    return torch.tensor([ord(letter) for letter in found], dtype=torch.int64)


def samples_of(setting: Setting, seed: int) -> tuple[Tensor, Tensor]:
    """Return the sequences that are trained on, in order, and others to evaluate with."""
    text, generator = letters(), torch.Generator().manual_seed(seed)
    split = len(text) * 9 // 10

    def draw(count: int, low: int, high: int) -> Tensor:
        starts = torch.randint(low, high - setting.length, (count, 1), generator=generator)
        return text[starts + torch.arange(setting.length)]

    return draw(setting.samples, 0, split), draw(setting.held, split, len(text))


def factor_of(step: int, steps: int) -> float:
    """Return the factor of a step's rate: linear warm-up, then a cosine to zero."""
    warmup = max(1.0, WARMUP * steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1.0, steps - warmup)))


def train(setting: Setting, method: Method, batch: int, rate: float, seed: int = 0) -> float:
    """Return the loss on held-out text after a run; what is worse than guessing, diverged runs too, counts as that."""
    torch.manual_seed(seed)
    trained, held = samples_of(setting, seed)
    sizes: dict[str, Any] = dict(hidden=setting.hidden, layers=setting.layers, max_positions=setting.length)
    model = GPT(GPTConfig(vocab_size=LETTERS, heads=2, **sizes))
    optimizer = method.make(list(model.parameters()), lr=rate)
    if isinstance(optimizer, NormOptimizer):
        optimizer.kernels = LAYERWISE
    steps = setting.samples // batch
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * factor_of(step, steps)
        for ids in trained[step * batch : (step + 1) * batch].split(setting.micro):
            loss = model(ids, labels=ids).loss * (len(ids) / batch)
            loss.backward()
        if not math.isfinite(loss.item()):
            return GUESS
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        found = float(model(held, labels=held).loss)
    return min(found, GUESS) if math.isfinite(found) else GUESS


def everything(setting: Setting | None = None, methods: Mapping[str, Method] = METHODS) -> dict[str, Any]:
    """Return all numbers: losses of the small batch by rate, and of every batch at the best rate, scaled."""
    setting = setting or Setting()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a small model, and numbers that do not hang on how many there are
    try:
        return {
            "setting": {**asdict(setting), "large": list(setting.large)},
            "guess": GUESS,
            "methods": {name: runs(setting, method) for name, method in methods.items()},
        }
    finally:
        torch.set_num_threads(threads)


def runs(setting: Setting, method: Method) -> dict[str, Any]:
    """Return the numbers of one optimizer."""
    tried = {rate: train(setting, method, setting.small, rate) for rate in method.rates}
    least = min(tried.values())
    best = min(rate for rate, loss in tried.items() if loss <= least + NEAR)
    losses = {str(setting.small): tried[best]}
    for batch in setting.large:
        losses[str(batch)] = train(setting, method, batch, best * math.sqrt(batch / setting.small))
    return {"tried": {f"{rate:g}": loss for rate, loss in tried.items()}, "rate": best, "losses": losses}
