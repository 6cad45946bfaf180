"""The peak of memory of a stack on the CPU, as torch's allocator reports it."""

from __future__ import annotations

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
    """Return the largest sum of allocations in forward and backward: inputs count, weights and their gradients do not.

    Over ranks, measure in a fake world. A thread of gloo often is the last one to hold a message, and the allocator reports
    what a thread releases to that thread only: on real ranks messages seem to stay alive for ever.
    """
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
    with tensor_memory() as memory:
        step()
    return memory.peak
