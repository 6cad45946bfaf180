"""The base of stacks: blocks one after another on whole tensors, which every rank has: split before, joined after."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.folding.axial.axes import WHOLE, Axes
from meshfold.folding.axial.sizes import Sizes
from meshfold.folding.memory import MemorySettings
from meshfold.mesh import MeshfoldError

Shapes = dict[str, tuple[int, ...]]


class Stack(nn.Module):
    """Blocks one after another on whole tensors.

    Attributes:
        blocks: the blocks.
        config: arguments that make such a stack.
        axes: over which its blocks are split.
        memory_limit: bytes of tensors that the stack may have at once on a rank; a plan then chooses chunks and recomputation for
            the sizes of each batch. None: no limit.
    """

    blocks: nn.ModuleList

    def __init__(self, **config: Any) -> None:
        """``config``: the arguments of the subclass, with ``no_blocks``."""
        super().__init__()
        self.config = config
        self.axes: Axes = WHOLE
        self.memory_limit: int | None = None
        self._chosen: dict[tuple[object, ...], MemorySettings] = {}

    def choose_memory(self, x: Tensor, **sizes: int) -> None:
        """Let a plan choose chunks and recomputation for a batch under :attr:`memory_limit`; nothing without one.

        Args:
            x: an input; its dtype and device count.
            sizes: of the batch, as for :class:`.Sizes`.

        Raises:
            MemoryPlanError: if nothing fits.
        """
        if self.memory_limit is None:
            return
        from meshfold.folding.memory.plan import FoldingRun, choose_settings

        training, kernels = torch.is_grad_enabled(), x.device.type != "cpu"
        key = (self.memory_limit, training, kernels, x.dtype, self.training, *sizes.items())
        if key not in self._chosen:
            mesh, mode = self.axes.mesh, self.axes.mode
            run = FoldingRun(
                sizes=Sizes(itemsize=x.element_size(), **sizes),
                mode=mode,
                axes={axis: mesh.size(axis) for axis in mode.axes},
                training=training,
                dtype=x.dtype,
                kernels=kernels,
            )
            self._chosen[key] = choose_settings(self, run, self.memory_limit)
        if self.axes.memory != self._chosen[key]:
            axes = replace(self.axes, memory=self._chosen[key])
            split: list[Any] = [module for module in self.modules() if isinstance(getattr(module, "axes", None), Axes)]
            for module in split:
                module.axes = axes

    def skeleton(self, no_blocks: int) -> Stack:
        """Return a stack like this one on the meta device, with other blocks than these: so many."""
        with torch.device("meta"):
            made = type(self)(**{**self.config, "no_blocks": no_blocks})
        return made.train(self.training)

    @abstractmethod
    def shapes(self, sizes: Sizes) -> tuple[Shapes, Shapes]:
        """Return the shapes of the input tensors and of the masks, by name, whole."""
        raise MeshfoldError(f"{type(self).__name__} does not say the shapes of its inputs: add a method shapes(sizes)")
