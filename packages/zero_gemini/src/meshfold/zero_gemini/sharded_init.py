"""Models that are never whole on any rank: built on the meta device, then filled in shard by shard."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from meshfold.mesh import SpecError
from meshfold.mesh.initialization import (
    ParameterInit,
    ValueSource,
    find_value_source,
    materialize,
    parameter_init,
    record_initialization,
    set_value_source,
    shard_coordinates,
)


class ShardedInit:
    """Builds a model without allocating it.

    >>> with ShardedInit(seed=0):
    ...     model = nn.Linear(4096, 4096)
    >>> model.weight.device.type
    'meta'

    Inside, every factory of torch makes a tensor on the meta device, and the initialisation by the model's own code is recorded.
    :class:`meshfold.zero_gemini.Gemini` and the engine then make each parameter's first values, one parameter at a time, and keep
    this rank's share. They depend only on the seed and the parameter's name: every mesh and every stage starts with the same model,
    the one that the engine makes of a function with this seed.

    A parameter that is never written (made by ``torch.empty`` and not filled) is an error there, which names it. So
    are weights loaded inside: load them with ``engine.load_state_dict`` instead.
    """

    def __init__(self, *, seed: int = 0) -> None:
        """Args:
            seed: of the random numbers.

        Raises:
            SpecError: for a seed that is not a whole number from 0 up.
        """
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise SpecError(f"seed={seed!r}: seed is a whole number from 0 up")
        self._seed = seed
        self._inside = ExitStack()

    def __enter__(self) -> ShardedInit:
        trace = self._inside.enter_context(record_initialization())
        origin = ValueSource(trace=trace, seed=self._seed)

        def note(module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
            if tensor is not None and trace.recording.knows(tensor):
                set_value_source(tensor, origin)

        self._inside.callback(register_module_parameter_registration_hook(note).remove)
        self._inside.callback(register_module_buffer_registration_hook(note).remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._inside.close()


def sharded_values(model: nn.Module, device: torch.device) -> ParameterInit | None:
    """Return the initializer of the parameters of a model built under :class:`ShardedInit`; None for another model.

    Its buffers are made here and now.

    Raises:
        MeshfoldError: if a buffer stays uninitialised.
    """
    origin = find_value_source(model)
    if origin is None:
        return None
    materialize(
        model,
        origin.trace,
        seed=origin.seed,
        device=device,
        parameters=False,
        placement_of=lambda name, tensor: shard_coordinates(tensor),
    )
    return parameter_init(origin.trace, origin.seed, device)
