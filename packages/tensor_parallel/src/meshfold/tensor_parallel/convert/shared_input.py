"""One gather for several linear layers that read the same tensor: queries, keys and values; gate and up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Size, Tensor, nn

from meshfold.tensor_parallel.layers.base import OnMesh, lowered
from meshfold.tensor_parallel.layers.linear import Linear
from meshfold.tensor_parallel.matmul import bind_enter_operand
from meshfold.tensor_parallel.plan import MatmulPlan


class SharedInput(OnMesh):
    """Gather that runs when the first layer is given a tensor; the others that are given it get the same result.

    Its gradient leaves once, for all of them. Nothing is kept once each layer has been called.
    """

    _seen: Tensor | None
    _whole: Tensor | None
    _version: int

    def __init__(self, columns: list[Linear]) -> None:
        """Args:
        columns: layers of one plan, children of one module.
        """
        first = columns[0]
        self.mesh = first.mesh
        self._gather, self._readers = bind_enter_operand(first.plan, first.mesh, "x"), len(columns)
        self._forget()
        for linear in columns:
            linear.use_entered_input(self._enter)

    def around(self, module: nn.Module) -> None:
        """Forget the last input before each forward of the module; that one may have been broken off."""
        # Not a hook behind the module: torch.compile guards on the number of such a hook, another in every block.
        module.register_forward_pre_hook(self._before)

    def _enter(self, x: Tensor) -> tuple[Tensor, Size]:
        """Gather ``.. k`` of the residual layout to ``m k``."""
        x = lowered(x)
        version = 0 if torch.compiler.is_compiling() else x._version  # of a tensor that was changed in place
        whole = self._whole
        if whole is None or x is not self._seen or version != self._version:
            whole = self._gather(x.reshape(-1, x.shape[-1]))
            self._seen, self._version, self._whole = x, version, whole
        self._calls += 1
        if self._calls == self._readers:
            self._forget()
        return whole, x.shape[:-1]

    def _before(self, module: nn.Module, args: Any) -> None:
        self._forget()

    def _forget(self) -> None:
        self._seen = self._whole = None
        self._version = self._calls = 0


def changes_tokens(plan: MatmulPlan) -> bool:
    """Return True if a rank's input and output have other tokens: x or y is gathered or scattered along m."""
    return any(dim == plan.m for operand in ("x", "y") for dim, _ in plan.extras(operand))
