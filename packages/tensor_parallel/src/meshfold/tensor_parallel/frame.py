"""The frame round a sharded model: what is given whole is made to fit, what comes out is whole.

- A batch that the mode cannot split is filled up with rows that count for nothing (labels −100), and rows of the
  output that belong to them are cut off.
- Logits stay split when the model computes its own loss, and come out whole when it does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.mesh import LayoutError, Mesh
from meshfold.mesh.primitives import take_block
from meshfold.tensor_parallel.layers.linear import Linear
from meshfold.tensor_parallel.modes import Mode

_IGNORED = -100


class Frame:
    """Hooks before and after a model's forward."""

    def __init__(self, model: nn.Module, mesh: Mesh, mode: Mode, *, flat: bool, blocks: bool) -> None:
        """Args:
            flat: the model flattens tokens, so the residual stream and the logits may be split within sequences.
            blocks: the stream is whole outside of the list of blocks.
        """
        self.model, self.mesh, self.mode, self.flat, self.blocks = model, mesh, mode, flat, blocks
        self.heads: list[Linear] = []
        self._rows = self._padded = 0

    def attach(self, heads: list[Any]) -> None:
        """Register the hooks; ``heads`` are the layers whose output is gathered if no loss is computed inside."""
        self.heads = [head for head in heads if isinstance(head, Linear)]
        for head in self.heads:
            head.gather_output = True
        self.model.register_forward_pre_hook(self._before, with_kwargs=True)
        self.model.register_forward_hook(self._after)

    def padded_rows(self, rows: int, sequence: int) -> int:
        """The smallest batch from ``rows`` up that can be split, for sequences of so many tokens."""
        residual = self.mesh.size(*self.mode.layout("residual")["m"])
        hidden = self.mesh.size(*self.mode.layout("hidden")["m"])
        logits = self.mesh.size(*self.mode.layout("logits")["m"])
        by_rows, by_tokens = (hidden, math.lcm(residual, logits)) if self.flat or self.blocks else (math.lcm(residual, hidden, logits), 1)
        found = rows
        while found % by_rows or found * sequence % by_tokens:
            found += 1
        return found

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for head in self.heads:
            head.gather_output = kwargs.get("labels") is None and not (len(args) > 1 and _is_labels(args))
        kwargs = self._mask(kwargs)
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.dim() > 1]
        if not tensors:
            return args, kwargs
        rows = tensors[0].shape[0]
        ids = tensors[0].dim() == 2 and not tensors[0].is_floating_point()
        self._rows, self._padded = rows, self.padded_rows(rows, tensors[0].shape[1] if ids else 1)
        if self._padded == rows:
            return args, kwargs
        args = tuple(self._pad(t, _IGNORED if i == 1 and _is_labels(args) else 0) for i, t in enumerate(args))
        fill = {"labels": _IGNORED, "shift_labels": _IGNORED, "attention_mask": 1}
        return args, {name: self._pad(t, fill.get(name, 0)) for name, t in kwargs.items()}

    def _mask(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """A mask that masks nothing is dropped; any other is cut as attention's batch is, where that is possible."""
        mask = kwargs.get("attention_mask")
        if not isinstance(mask, Tensor):
            return kwargs
        if bool((mask == 1).all()):
            return {**kwargs, "attention_mask": None}
        tokens = self.mode.layout("hidden")["m"]
        if self.mesh.size(*tokens) > 1:
            raise LayoutError(
                f"an attention_mask with padding cannot be used in mode {self.mode.name!r}, which splits the batch: leave it "
                f"out, pad on the right and give padding the label {_IGNORED} (causal attention never looks at it)"
            )
        return kwargs

    def _pad(self, value: Any, fill: int) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != self._rows:
            return value
        return torch.cat([value, value.new_full((self._padded - self._rows, *value.shape[1:]), fill)])

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._rows == self._padded or (self.heads and not self.heads[0].gather_output):
            return output
        if isinstance(output, Tensor):
            return self._cut(output)
        if isinstance(output, tuple) and not hasattr(output, "_fields"):
            return tuple(self._cut(value) for value in output)
        fields = output if isinstance(output, Mapping) else vars(output)
        for name in list(fields):
            value = self._cut(fields[name])
            if isinstance(output, Mapping):
                output[name] = value  # type: ignore[index]
            else:
                object.__setattr__(output, name, value)
        return output

    def _cut(self, value: Any) -> Any:
        return value[: self._rows] if isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == self._padded else value


def _is_labels(args: tuple[Any, ...]) -> bool:
    """Whether a second positional argument looks like labels: integers of the shape of the ids."""
    return (
        len(args) > 1
        and isinstance(args[0], Tensor)
        and isinstance(args[1], Tensor)
        and args[0].shape == args[1].shape
        and args[1].dtype == torch.int64 == args[0].dtype
    )
