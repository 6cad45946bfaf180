"""Engines of trainers: a model with an objective in place of its loss, and the weights of an earlier stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from meshfold.align.objective import Objective
from meshfold.align.run import run_checkpoint
from meshfold.checkpoint import CheckpointError
from meshfold.engine import Engine
from meshfold.engine.checkpoints import Checkpoint, read_whole, with_plain_names
from meshfold.engine.world import fail_together
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
    new_head: bool = False,
    **settings: Any,
) -> Engine:
    """Return an engine that trains a model by an objective.

    Args:
        objective: in place of the model's loss; it is attached to the engine.
        model: as of :class:`meshfold.engine.Engine`.
        parallel: the spec.
        micro_steps: parts of a step's batch that are run one after the other.
        start: a checkpoint to take weights from, see :func:`start_from`; None: those of ``model``.
        dropout: the model may have dropout; False where two calls of it are compared.
        new_head: of :func:`start_from`.
        settings: further ones of the engine: ``optimizer``, ``precision``, ...

    Raises:
        SpecError: for a setting out of range, or a model with dropout that may have none.
    """
    engine = Engine(model, parallel, loss_fn=objective, gradient_accumulation=micro_steps, **settings)
    if not dropout:
        _refuse_dropout(engine)
    start_from(engine, start, new_head=new_head)
    objective.attach(engine)
    return engine


def start_from(engine: Engine, start: str | None, *, new_head: bool = False) -> None:
    """Load the weights of a checkpoint, such as one from an earlier stage; None: leave them. All ranks must call.

    Args:
        engine: whose model gets them.
        start: the folder of the checkpoint, or of a run of :func:`meshfold.align.fit`.
        new_head: the model returns scores; of a language model's checkpoint it gets all but the head, and keeps its own one.

    Raises:
        CheckpointError: on all ranks, if there is none, it is damaged, or of another model.
    """
    if start is None:
        return
    start = run_checkpoint(start) or start
    if not new_head:
        engine.load(start, weights_only=True)
        return
    error: CheckpointError | None = None
    given: dict[str, Tensor] = {}
    sources = engine.model_state.sources()
    try:
        found = Checkpoint(start)
        given = with_plain_names(found.model)
        found.verify(engine.mesh.rank, engine.mesh.world_size, weights_only=True)
    except CheckpointError as wrong:
        error = wrong
    what = f"load({start!r})"
    fail_together(engine.world, error, what)
    mine = [name for name, one in sources.items() if name not in given or tuple(given[name].shape) != one.shape]
    theirs = [name for name in given if name not in sources or name in mine]
    # A module each, mine with one output: else it is another model, and loading it says where.
    modules = [{name.rpartition(".")[0] for name in names} for names in (mine, theirs)]
    if mine and all(sources[name].shape[:1] == (1,) for name in mine) and max(map(len, modules)) == 1:
        kept = read_whole({name: sources[name] for name in mine}, engine.world, what)
        given = {name: value for name, value in given.items() if name not in theirs} | kept
    engine.load_state_dict(given)


def _refuse_dropout(engine: Engine) -> None:
    """Refuse a model with dropout: each call would return the log-probabilities of a different policy."""
    for name, module in engine.model.named_modules():
        p = getattr(module, "p", 0.0)
        if "Dropout" in type(module).__name__ and isinstance(p, float) and p > 0:
            raise SpecError(
                f"{name} drops {p:g} of its input, so two calls of the policy disagree: build the model with dropout 0, as in "
                "LlamaConfig(dropout=0.0) or pretrained(folder, attention_dropout=0.0)"
            )
