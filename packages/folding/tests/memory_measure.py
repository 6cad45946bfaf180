"""The peak of memory of a stack on the CPU, as torch's allocator reports it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from meshfold.folding import MemorySettings, parallelize_folding
from meshfold.folding.axial.sizes import Sizes
from meshfold.folding.stack import Stack
from meshfold.mesh import Mesh, dropout_stream
from meshfold.mesh.testing import tensor_memory


def measured_peak(
    stack: Stack, sizes: Sizes, mesh: Mesh, mode: str, settings: MemorySettings, *, training: bool
) -> int:
    """Return the largest sum of allocations in forward and backward: inputs count, weights and their gradients do not."""
    parallelize_folding(stack, mesh, mode, memory=settings)
    for parameter in stack.parameters():
        parameter.grad = torch.zeros_like(parameter) if training else None
    tensors, masks = stack.shapes(sizes)

    def step() -> None:
        given: dict[str, Tensor] = {name: torch.ones(shape) for name, shape in (tensors | masks).items()}
        for name in tensors:
            given[name].requires_grad_(training)
        with torch.set_grad_enabled(training), dropout_stream(0, 0):
            made = stack(**given)
            outputs = made if isinstance(made, tuple) else (made,)
            if training:
                torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])

    step()  # what is made once
    # Threads of a collective may release its tensors late, so the lower of two peaks counts.
    return min(_peak(step) for _ in range(2 if mesh.world_size > 1 else 1))


def _peak(step: Callable[[], None]) -> int:
    with tensor_memory() as memory:
        step()
    return memory.peak
