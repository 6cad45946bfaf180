"""Recording of ``configure_model``, so that no rank ever holds the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from meshfold.mesh.initialization import ValueSource, record_initialization, set_value_source


@contextmanager
def recorded(seed: int) -> Iterator[None]:
    """Inside, modules are made on the meta device, and their parameters remember how they are initialised.

    As :class:`meshfold.zero_gemini.ShardedInit`, for those who have not installed it.
    """
    with record_initialization() as trace:
        origin = ValueSource(trace=trace, seed=seed)

        def note(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            if parameter is not None and trace.recording.knows(parameter):
                set_value_source(parameter, origin)

        handle = register_module_parameter_registration_hook(note)
        try:
            yield
        finally:
            handle.remove()
