"""Moving averages of a model's weights, kept by ``optimizer=dict(..., average=0.9999)``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from meshfold.engine.checkpoints.model_state import read_whole
from meshfold.engine.errors import TrainingError
from meshfold.optimizers import AVERAGE

if TYPE_CHECKING:
    from meshfold.engine.engine import Engine


def averaged_state_dict(engine: Engine) -> dict[str, Tensor]:
    """Return the model's state dict with averages in place of the trained weights, in CPU memory; all ranks must call.

    Frozen parameters and buffers are those of the model. So are all before the first step.

    Raises:
        TrainingError: if the engine's optimizer keeps no averages.
    """
    if not getattr(engine.optimizer, "averages_weights", False):
        raise TrainingError(
            "the engine keeps no averages: give Engine(..., optimizer=dict(name='adamw', average=0.9999))"
        )
    suffix = f"/{AVERAGE}"
    sources = {name: source for name, source in engine.model_state.optimizer_sources().items() if name.endswith(suffix)}
    averages = read_whole(sources, engine.world, "cannot read the averages of the weights")
    found, ties = engine.full_state_dict(), engine.model_state.ties()
    for name in found:
        average = averages.get(f"{ties.get(name, name)}{suffix}")
        found[name] = found[name] if average is None else average
    return found


@contextmanager
def averaged_weights(engine: Engine) -> Iterator[None]:
    """Context manager: inside, the model has its averages, for sampling and evaluation; all ranks must enter.

    Do not train inside: the weights from before return at the end. Every rank keeps them in CPU memory meanwhile.

    Raises:
        TrainingError: if the engine's optimizer keeps no averages.
    """
    averages = averaged_state_dict(engine)
    weights = engine.full_state_dict()
    engine.load_state_dict(averages)
    try:
        yield
    finally:
        engine.load_state_dict(weights)
