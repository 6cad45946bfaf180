"""Engines of trainers: a model with an objective in place of its loss, and the weights of an earlier stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from meshfold.align.objective import Objective
from meshfold.engine import Engine
from meshfold.mesh import SpecError

Model = nn.Module | Callable[[], nn.Module]


def trained_engine(
    objective: Objective,
    model: Model,
    parallel: Any,
    *,
    micro_steps: int,
    start: str | None,
    dropout: bool = True,
    **settings: Any,
) -> Engine:
    """Return an engine that trains a model by an objective.

    Args:
        objective: in place of the model's loss; it is attached to the engine.
        model: as of :class:`meshfold.engine.Engine`.
        parallel: the spec.
        micro_steps: parts of a step's batch that are run one after the other.
        start: a checkpoint to take weights from; None: those of ``model``.
        dropout: the model may have dropout; False where two calls of it are compared.
        settings: further ones of the engine: ``optimizer``, ``precision``, ...

    Raises:
        SpecError: for a setting out of range, or a model with dropout that may have none.
    """
    engine = Engine(model, parallel, loss_fn=objective, gradient_accumulation=micro_steps, **settings)
    if not dropout:
        _refuse_dropout(engine)
    start_from(engine, start)
    objective.attach(engine)
    return engine


def start_from(engine: Engine, start: str | None) -> None:
    """Load the weights of a checkpoint, such as one from an earlier stage; None: leave them."""
    if start is not None:
        engine.load(start, weights_only=True)


def _refuse_dropout(engine: Engine) -> None:
    """Refuse a model with dropout: each call would return the log-probabilities of a different policy."""
    for name, module in engine.model.named_modules():
        p = getattr(module, "p", 0.0)
        if "Dropout" in type(module).__name__ and isinstance(p, float) and p > 0:
            raise SpecError(
                f"{name} drops {p:g} of its input, so two calls of the policy disagree: build the model with dropout 0, as in "
                "LlamaConfig(dropout=0.0) or pretrained(folder, attention_dropout=0.0)"
            )
