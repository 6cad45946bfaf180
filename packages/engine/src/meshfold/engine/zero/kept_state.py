"""Size of an optimizer's state under ``zero``, before any of it exists."""

from __future__ import annotations

from torch import nn

from meshfold.engine.optimizers import Trial
from meshfold.engine.precision import Precision, other_dtypes
from meshfold.engine.world import World
from meshfold.mesh.spec import ZeroSpec
from meshfold.zero_gemini import slot_alignment
from meshfold.zero_gemini.optimizer import StateSize, optimizer_kind, owned_state_size, state_size


def kept_state(trial: Trial, model: nn.Module, world: World, precision: Precision, spec: ZeroSpec) -> StateSize:
    """Return the size of an optimizer's state under ``zero``.

    Args:
        trial: the optimizer, of the model's parameters.
        model: this rank's part; parameters carry their metadata.
        world: its ranks.
        precision: of the model.
        spec: the entry.

    Raises:
        MemoryPlanError: for an optimizer that cannot run on chunks.
    """
    dtypes = precision.dtype, precision.master_dtype
    if optimizer_kind(trial.optimizer, [dtypes]) != "matrices":
        return state_size(trial.optimizer, *dtypes)
    return owned_state_size(
        model,
        world.mesh,
        trial.optimizer,
        trial.stand_ins,
        dtype=precision.dtype,
        master_dtype=precision.master_dtype,
        other_dtypes=other_dtypes(model, precision),
        slot_align_elems=slot_alignment(spec.regime),
        stays=spec.placement == "cuda",
    )
