"""The base of stacks: blocks one after another on whole tensors, which every rank has: split before, joined after."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import nn

from meshfold.folding.axial.axes import WHOLE, Axes
from meshfold.folding.axial.sizes import Sizes
from meshfold.mesh import MeshfoldError

Shapes = dict[str, tuple[int, ...]]


class Stack(nn.Module):
    """Blocks one after another on whole tensors.

    Attributes:
        blocks: the blocks.
        config: arguments that make such a stack.
        axes: over which its blocks are split.
    """

    blocks: nn.ModuleList

    def __init__(self, **config: Any) -> None:
        """``config``: the arguments of the subclass, with ``no_blocks``."""
        super().__init__()
        self.config = config
        self.axes: Axes = WHOLE

    def skeleton(self, no_blocks: int) -> Stack:
        """Return a stack like this one on the meta device, with other blocks than these: so many."""
        with torch.device("meta"):
            made = type(self)(**{**self.config, "no_blocks": no_blocks})
        return made.train(self.training)

    @abstractmethod
    def shapes(self, sizes: Sizes) -> tuple[Shapes, Shapes]:
        """Return the shapes of the input tensors and of the masks, by name, whole."""
        raise MeshfoldError(f"{type(self).__name__} does not say the shapes of its inputs: add a method shapes(sizes)")
