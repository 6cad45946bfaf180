"""A limit of a stack's memory, which a plan keeps to for the sizes of each batch."""

from __future__ import annotations

import torch
from torch import Tensor

from meshfold.folding.axial.sizes import Sizes
from meshfold.folding.memory import MemorySettings
from meshfold.folding.planning.plan import choose_settings
from meshfold.folding.planning.run import FoldingRun
from meshfold.folding.stack import Stack


class MemoryLimit:
    """Chooses chunks and recomputation for a stack, once for each size of a batch. All ranks choose the same."""

    def __init__(self, limit: int) -> None:
        """``limit``: bytes of tensors, weights apart, that the stack may have at once on a rank."""
        self.limit = limit
        self._chosen: dict[tuple[object, ...], MemorySettings] = {}

    def __call__(self, stack: Stack, x: Tensor, sizes: dict[str, int]) -> MemorySettings:
        """Return the settings for a batch.

        Args:
            stack: about to run.
            x: an input; its dtype and device count.
            sizes: of the batch, as for :class:`.Sizes`.

        Raises:
            MemoryPlanError: if nothing fits.
        """
        training, kernels = torch.is_grad_enabled(), x.device.type != "cpu"
        key = (training, stack.training, kernels, x.dtype, *sizes.items())
        if key not in self._chosen:
            mesh, mode = stack.axes.mesh, stack.axes.mode
            run = FoldingRun(
                sizes=Sizes(itemsize=x.element_size(), **sizes),
                mode=mode,
                axes={axis: mesh.size(axis) for axis in mode.axes},
                training=training,
                dtype=x.dtype,
                kernels=kernels,
            )
            self._chosen[key] = choose_settings(stack, run, self.limit)
        return self._chosen[key]
