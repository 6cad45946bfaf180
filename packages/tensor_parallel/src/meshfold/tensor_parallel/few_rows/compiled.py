"""Blocks of a model compiled for a token of each sequence: norms, products and activations in few kernels.

Attention over pages is one operation in a block's graph. Matrix products with one row are compiled as sums, which read
weights at almost the speed of memory once Inductor has tuned their sizes (``coordinate_descent_tuning``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from meshfold.tensor_parallel.few_rows.row_kernels import replaced_forwards

_MOST_VERSIONS = 64
"""compiled versions of a block: one for each number of rows"""


class CompiledBlocks:
    """The blocks of a model: members of a list of modules that have an attention layer each."""

    def __init__(self, model: nn.Module, attention: Collection[nn.Module], backend: str | Callable[..., Any]) -> None:
        """Args:
        model: the model.
        attention: its attention layers.
        backend: of torch.compile.
        """
        layers = set(attention)
        self._forwards: dict[nn.Module, Callable[..., Any]] = {}
        for module in model.modules():
            for block in module if isinstance(module, nn.ModuleList) else ():
                if not layers.isdisjoint(block.modules()):
                    self._forwards[block] = torch.compile(block.forward, backend=backend, dynamic=False)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Context manager: the blocks run compiled."""
        from torch._dynamo import config as dynamo
        from torch._inductor import config as inductor

        with (
            replaced_forwards(self._forwards),
            inductor.patch(coordinate_descent_tuning=True),
            dynamo.patch(recompile_limit=_MOST_VERSIONS),
        ):
            yield
