"""Shared by tests of the expert axis: a small mixture of experts with a balance loss, and the same run in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.engine import Engine
from meshfold.experts import MixtureOfExperts, SigmoidRouter, balance_loss
from meshfold.mesh.testing import run_on_ranks
from meshfold.models import GPT, GPTConfig
from meshfold.models.gpt import MLP
from meshfold.models.loss import CausalLMOutput

VOCABULARY, HIDDEN, EXPERTS = 29, 16, 8
ADAMW: dict[str, Any] = dict(name="adamw", lr=1e-2, weight_decay=0.1, eps=1e-4)
SGD: dict[str, Any] = dict(name="sgd", lr=1.0)
CLIP = 0.5


class MoE(GPT):
    """A GPT whose MLPs are mixtures; the loss counts on the balance of the global batch."""

    def __init__(
        self,
        *,
        factor: float = 0.3,
        starved: bool = False,
        sigmoid: bool = False,
        shared: int | None = 12,
        layers: int = 2,
        capacity: float | None = None,
    ) -> None:
        super().__init__(GPTConfig(vocab_size=VOCABULARY, hidden=HIDDEN, layers=layers, heads=4, max_positions=16))
        self.factor = factor
        for block in self.blocks:
            router: Any = SigmoidRouter(HIDDEN, EXPERTS, 2) if starved or sigmoid else "softmax"
            block.mlp = MixtureOfExperts(HIDDEN, 10, EXPERTS, 2, router=router, shared=shared, capacity=capacity)
            if starved:  # nothing goes to the second half of the experts, nor to the first of them
                block.mlp.router.selection_bias[EXPERTS // 2 :] = -100.0
                block.mlp.router.selection_bias[0] = -100.0

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **given: Any) -> CausalLMOutput:
        output = super().forward(input_ids, labels, **given)
        if output.loss is None or not self.factor or not self.training:
            return output
        return replace(output, loss=output.loss + self.factor * balance_loss(self))


class LastDense(MoE):
    """Only the first two of four blocks have mixtures."""

    def __init__(self) -> None:
        super().__init__(layers=4)
        for block in self.blocks[2:]:
            block.mlp = MLP(HIDDEN, 20)


class TwoInABlock(MoE):
    """A block with two mixtures."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].mlp = nn.Sequential(self.blocks[0].mlp, MixtureOfExperts(HIDDEN, 10, EXPERTS, 2))


MODELS: dict[str, Callable[[], MoE]] = {
    "plain": MoE,
    "starved": partial(MoE, starved=True),
    "unbalanced": partial(MoE, factor=0.0),
    "unbalanced starved": partial(MoE, factor=0.0, starved=True),
    "biased": partial(MoE, factor=0.0, sigmoid=True),
    "dropping": partial(MoE, capacity=0.7),
    "deep": partial(MoE, layers=4, shared=None),
    "deep starved": partial(MoE, layers=4, starved=True),
    "last dense": LastDense,
    "two in a block": TwoInABlock,
}


def built(model: str) -> MoE:
    """The same module on every rank, with real weights."""
    torch.manual_seed(3)
    return MODELS[model]().double()


def batches(count: int, rows: int = 8, length: int = 8) -> list[dict[str, Tensor]]:
    """Rows have different numbers of labels that count; the first one none."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        ids = torch.randint(VOCABULARY, (rows, length), generator=generator)
        labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -100)
        labels[0] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


@contextmanager
def parts_of_few_rows() -> Iterator[None]:
    """Context manager: with an all-gather a few rows beyond those that backward keeps are computed apart, too."""
    module: Any = import_module("meshfold.experts.dispatch")
    before, module.FEW = module.FEW, 0
    try:
        yield
    finally:
        module.FEW = before


def engine_of(parallel: dict[str, Any], model: str = "plain", **settings: Any) -> Engine:
    arguments: dict[str, Any] = dict(optimizer=SGD, precision="fp64", clip_grad_norm=CLIP)
    return Engine(built(model), parallel, **{**arguments, **settings})


Seen = tuple[list[float], dict[str, Tensor]]


def run(parallel: dict[str, Any], model: str = "plain", steps: int = 2, **settings: Any) -> Seen:
    """Losses, norms and evaluations of some steps, logits, and the whole model after each step: with SGD the gradients."""
    numbers: list[float] = []
    state: dict[str, Tensor] = {}
    with parts_of_few_rows(), engine_of(parallel, model, **settings) as engine:
        for step, batch in enumerate(batches(steps)):
            state[f"{step} logits"] = engine.predict({"input_ids": batch["input_ids"]}).logits
            numbers.append(engine.eval_step(engine.shard_batch(batch)))
            numbers.append(engine.train_step(engine.shard_batch(batch)))
            assert engine.last is not None and engine.last.grad_norm is not None
            numbers.append(engine.last.grad_norm)
            state.update({f"{step} {name}": value for name, value in engine.full_state_dict().items()})
    return numbers, state


def assert_same(found: Seen, wanted: Seen, what: object, tolerance: float = 1e-9) -> None:
    for one, other in zip(found[0], wanted[0], strict=True):
        assert abs(one - other) <= tolerance * max(1.0, abs(other)), (what, found[0], wanted[0])
    assert list(found[1]) == list(wanted[1])
    for name, value in wanted[1].items():
        off = float((found[1][name] - value).abs().max())
        assert off <= tolerance, f"{what}: {name} is off by {off:.3g}"


def on_ranks(count: int, parallel: dict[str, Any], model: str = "plain", **settings: Any) -> Seen:
    """Return what rank 0 saw."""
    found: Seen = run_on_ranks(count, run, parallel, model, **settings)[0]
    return found
