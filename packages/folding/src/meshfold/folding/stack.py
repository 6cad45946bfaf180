"""The base of stacks: blocks one after another on whole tensors, which every rank has: split before, joined after."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.folding.axial.axes import WHOLE, Axes
from meshfold.folding.axial.sizes import Sizes
from meshfold.folding.memory import MemorySettings
from meshfold.mesh import MeshfoldError

Shapes = dict[str, tuple[int, ...]]
Chooser = Callable[["Stack", Tensor, dict[str, int]], MemorySettings]


class Stack(nn.Module):
    """Blocks one after another on whole tensors.

    Attributes:
        blocks: the blocks.
        config: arguments that make such a stack.
        axes: over which its blocks are split.
        chooser: returns chunks and recomputation for the sizes of a batch, under a limit; None: they are those of ``axes``.
    """

    blocks: nn.ModuleList

    def __init__(self, **config: Any) -> None:
        """``config``: the arguments of the subclass, with ``no_blocks``."""
        super().__init__()
        self.config = config
        self.axes: Axes = WHOLE
        self.chooser: Chooser | None = None

    def choose_memory(self, x: Tensor, **sizes: int) -> None:
        """Take the settings that :attr:`chooser` returns for a batch; nothing without one.

        Args:
            x: an input; its dtype and device count.
            sizes: of the batch, as for :class:`.Sizes`.
        """
        if self.chooser is None:
            return
        settings = self.chooser(self, x, sizes)
        if self.axes.memory != settings:
            self.set_axes(replace(self.axes, memory=settings))

    def set_axes(self, axes: Axes) -> None:
        """Split the stack, and every block in it, over these axes."""
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
