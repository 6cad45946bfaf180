"""A run of a stack that a plan is for, and that run on meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from meshfold.folding.axial.axes import Axes
from meshfold.folding.axial.modes import AxialMode
from meshfold.folding.axial.sizes import Sizes
from meshfold.folding.memory.settings import MemorySettings
from meshfold.folding.stack import Stack
from meshfold.mesh import MetaMesh


@dataclass(frozen=True, kw_only=True)
class FoldingRun:
    """Sizes, ranks and precision that a plan is for.

    Attributes:
        sizes: of a batch.
        mode: the axial mode.
        axes: the ranks, by axis.
        training: forward and backward, else forward without gradients.
        dtype: of tensors and weights.
        kernels: count what a GPU runs, with kernels as :func:`meshfold.kernels.use` chooses them; else what a CPU runs.
    """

    sizes: Sizes
    mode: AxialMode
    axes: Mapping[str, int]
    training: bool = True
    dtype: torch.dtype = torch.bfloat16
    kernels: bool = True

    @property
    def ranks(self) -> str:
        """``one rank``, or the axes with their sizes."""
        split = {axis: size for axis, size in self.axes.items() if size > 1}
        return (
            f"{self.mode.name} {' × '.join(f'{axis} {size}' for axis, size in split.items())}" if split else "one rank"
        )

    def skeleton(self, stack: Stack, blocks: int, settings: MemorySettings) -> Stack:
        """Return a stack of so many blocks on the meta device, split as this run is; in training its weights have gradients.

        Make it before tensors are counted: weights and their gradients are counted apart.
        """
        model = stack.skeleton(blocks).to(self.dtype)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter) if self.training else None
        model.set_axes(Axes.of(MetaMesh(self.axes), self.mode, memory=settings))
        return model

    def step(self, model: Stack, named: Callable[[str], AbstractContextManager[object]] = nullcontext) -> None:
        """Run forward, and backward in training.

        Args:
            model: a :meth:`skeleton`.
            named: opens a context in which tensors are made that have this name.
        """
        tensors, masks = model.shapes(self.sizes)
        given: dict[str, Tensor] = {}
        for name, shape in (tensors | masks).items():
            with named(f"input {name}"):
                given[name] = torch.empty(shape, dtype=self.dtype, device="meta")
        for name in tensors:
            given[name].requires_grad_(self.training)
        with torch.set_grad_enabled(self.training):
            made = model(**given)
            outputs = [y for y in (made if isinstance(made, tuple) else (made,)) if isinstance(y, Tensor)]
            if self.training:
                with named("gradient of an output"):
                    gradients = [torch.empty_like(y) for y in outputs]
                torch.autograd.backward(outputs, gradients)
