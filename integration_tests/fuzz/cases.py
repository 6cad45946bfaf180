"""One case: a model, a spec and a way to train, as data that can be printed, read back and run again."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from integration_tests.fuzz.grammar import Grammar
from integration_tests.fuzz.specs import spec_for

Spec = dict[str, Any]

#: With an epsilon of the size of gradients: one that is wrong by a factor shows in the weights, and rounding does not grow.
OPTIMIZERS: list[dict[str, Any]] = [
    dict(name="sgd", lr=0.5),
    dict(name="sgd", lr=0.2, momentum=0.9),
    dict(name="sgd", lr=0.2, momentum=0.9, nesterov=True, weight_decay=0.1),
    dict(name="sgd", lr=0.3, weight_decay=0.2, no_decay="norms_and_biases"),
    dict(name="adamw", lr=0.05, eps=0.1, weight_decay=0.1),
    dict(name="adamw", lr=0.05, eps=0.1, weight_decay=0.3, no_decay="norms_and_biases"),
    dict(name="adam", lr=0.05, eps=0.1, betas=[0.8, 0.9]),
    dict(name="Adagrad", lr=0.1, eps=0.1),
    dict(name="RMSprop", lr=0.02, eps=0.1, momentum=0.5),
    dict(name="Adadelta", lr=0.5, eps=0.1),
]
CLIPS: list[dict[str, Any]] = [
    dict(clip_grad_norm=0.1),
    dict(clip_grad_norm=0.5, clip_norm_type=1.0),
    dict(clip_grad_norm=0.02, clip_norm_type="inf"),
    dict(clip_grad_value=0.01),
]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, under what, and how.

    Attributes:
        model: its description.
        spec, ranks: of the training.
        then, then_ranks: the spec under which the checkpoint of half the steps goes on; None: no checkpoint.
        optimizer, clip: as the engine takes them.
        accumulation: micro-steps of a step.
        steps: of the optimizer, under each spec.
        rows: of the global batch.
        ignored: share of the labels that do not count.
        recompute: the engine's.
        made: ``module``, or ``function`` that makes one.
        scheduler: whether the learning rate falls by half each step.
        dropout: probability of the model's layers that drop; then one process of the engine is what it is compared with, since
            torch's own generator drops other elements.
        loop: ``train_step``, or ``own``: output, loss, backward and step by hand.
        rules: of tensor parallelism, by name of a kind of part: ``replicate`` for what no mode knows.
        seed: of weights, batches and the engine.
    """

    model: dict[str, Any]
    spec: Spec
    ranks: int
    then: Spec | None = None
    then_ranks: int = 0
    optimizer: dict[str, Any] = field(default_factory=lambda: dict(name="sgd", lr=0.5))
    clip: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 1
    steps: int = 2
    rows: int = 4
    ignored: float = 0.0
    recompute: str | None = None
    made: str = "module"
    scheduler: bool = False
    dropout: float = 0.0
    loop: str = "train_step"
    rules: bool = False
    seed: int = 0

    def to_json(self) -> str:
        """One line."""
        plain = Case(model={}, spec={}, ranks=1)
        kept = {
            name: value
            for name, value in asdict(self).items()
            if name in ("model", "spec", "ranks") or value != getattr(plain, name)
        }
        return json.dumps(kept, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Case:
        """The way back."""
        return cls(**json.loads(text))


def random_case(seed: int) -> Case:
    """The case of a seed: the same one every time."""
    draw = random.Random(seed)
    ranks = draw.choice([2] * 12 + [4] * 4 + [1] + [3]) if draw.random() > 0.01 else 8
    model = Grammar(draw).model()
    spec = spec_for(draw, ranks)
    then, then_ranks = None, 0
    if draw.random() < 0.15:
        then_ranks = draw.choice([1, 2, 2, 4]) if ranks < 8 else 2
        then = spec_for(draw, then_ranks)
    several = draw.random() < 0.4
    made = Case(
        model=model,
        spec=spec,
        ranks=ranks,
        then=then,
        then_ranks=then_ranks,
        optimizer=draw.choice(OPTIMIZERS) if several else OPTIMIZERS[0],
        clip=draw.choice(CLIPS) if draw.random() < 0.2 else {},
        accumulation=draw.choice([2, 3]) if draw.random() < 0.15 else 1,
        steps=draw.choice([2, 2, 3]) if then is None else 2,
        rows=draw.choice([4, 4, 4, 2, 2, 1, 3, 5, 6, 8]),
        ignored=draw.choice([0.0, 0.0, 0.3]),
        recompute="blocks" if draw.random() < 0.08 else None,
        made="function" if draw.random() < 0.15 else "module",
        scheduler=draw.random() < 0.08,
        rules=draw.random() < 0.7,
        dropout=0.3 if draw.random() < 0.06 else 0.0,
        loop="own" if draw.random() < 0.06 else "train_step",
        seed=draw.randrange(1000),
    )
    return by_hand(made)


def by_hand(case: Case) -> Case:
    """A case whose loop is the user's: equal rows on all ranks, all labels count, and no stages, or else the engine's loop."""
    if case.model.get("tokens_first"):
        case = replace(case, dropout=0.0)  # falls by place in the batch, and dim 0 is taken for its rows
    stages = "pipeline" in case.spec or "pipeline" in (case.then or {})
    if case.loop == "own" and not stages and "loss" not in case.model:
        return replace(case, rows=2 * math.lcm(case.ranks, case.then_ranks or 1), ignored=0.0)
    return replace(case, loop="train_step")
