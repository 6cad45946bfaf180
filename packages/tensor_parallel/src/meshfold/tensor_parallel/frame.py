"""The frame round a sharded model: what is given whole is made to fit, what comes out is whole.

- A batch that the mode cannot split is filled up with rows that count for nothing (labels −100), and rows of the
  output that belong to them are cut off.
- Logits stay split when the model computes its own loss, and come out whole when it does not.
- The residual stream comes out whole of a model that has no head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.mesh import LayoutError, Mesh
from meshfold.mesh.primitives import bind_collect, take_block
from meshfold.tensor_parallel.layers.base import OnMesh
from meshfold.tensor_parallel.layers.embedding import PositionEmbedding
from meshfold.tensor_parallel.layers.linear import Linear
from meshfold.tensor_parallel.modes import Mode

_IGNORED = -100
_LABELS = ("labels", "shift_labels", "targets", "target")
_NOT_ROWS = ("cache_position",)
_INSIDE = ("output_hidden_states", "output_attentions")


class Frame(OnMesh):
    """Hooks before and after a model's forward."""

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        mode: Mode,
        outer: Mode,
        *,
        by_tokens: bool,
        heads: list[Linear],
        positions: list[PositionEmbedding],
        loss: bool,
        hidden: int,
    ) -> None:
        """Args:
        outer: the mode outside of the blocks, where that is another.
        by_tokens: the residual stream and the logits may be split within sequences.
        heads: the layers whose output is gathered if no loss is computed inside.
        positions: the tables that have to know the batch.
        loss: the model has a loss that takes split logits.
        hidden: size of a residual stream that comes out split; 0 if it does not come out.
        """
        self.model, self.mesh, self.mode = model, mesh, mode
        self.heads, self.positions, self.loss, self.hidden = heads, positions, loss, hidden
        residual, logits = outer.layout("residual"), outer.layout("logits")
        blocks = [mesh.size(*mode.layout("residual")["m"]), mesh.size(*logits["m"])]
        # Where the stream is split by tokens, batch times sequence has to be a multiple; else the batch has.
        self._by_tokens = math.lcm(*blocks) if by_tokens else 1
        self._by_rows = math.lcm(
            mesh.size(*mode.layout("hidden")["m"]), 1 if by_tokens else math.lcm(*blocks)
        )
        self._columns = residual["h"]
        self._attended, self._stream = (
            tuple(axis for axis in axes if mesh.size(axis) > 1)
            for axes in (mode.layout("hidden")["m"], residual["m"])
        )
        self._splits_stream = mesh.size(*residual.axes) > 1
        self._join_rows, self._join_columns = (
            bind_collect(mesh, 0, residual["m"]),
            bind_collect(mesh, -1, residual["h"]),
        )
        self._rows = self._padded = 0
        for head in heads:
            head.gather_output = True

    def attach(self) -> None:
        """Register the hooks."""
        self.model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)
        self.model.register_forward_hook(self._after)

    def padded_rows(self, rows: int, sequence: int) -> int:
        """The smallest batch from ``rows`` up that can be split, for sequences of so many tokens."""
        step = math.lcm(self._by_rows, self._by_tokens // math.gcd(self._by_tokens, sequence))
        return math.ceil(rows / step) * step

    # -- in -----------------------------------------------------------------------------------------------------

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._rows = self._padded = 0
        self._refuse(kwargs)
        if self.loss:
            has_labels = any(kwargs.get(name) is not None for name in _LABELS) or _is_labels(args)
            for head in self.heads:
                head.gather_output = not has_labels
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.dim() > 1]
        if not tensors:
            return args, kwargs
        first = tensors[0]
        sequence = first.shape[1] if first.dim() == (3 if first.is_floating_point() else 2) else 1
        if kwargs.get("use_cache"):
            sequence = 1  # the batch must stay the same when further tokens come one at a time
        self._rows, self._padded = first.shape[0], self.padded_rows(first.shape[0], sequence)
        for table in self.positions:
            table.whole_rows = self._padded
        if self._padded != self._rows:
            labels = _is_labels(args)
            args = tuple(self._pad(t, ignored=i == 1 and labels) for i, t in enumerate(args))
            kwargs = {
                name: value if name in _NOT_ROWS else self._pad(value, ignored=name in _LABELS)
                for name, value in kwargs.items()
            }
        return args, self._cut_rows(self._drop_mask(kwargs))

    def _refuse(self, kwargs: Mapping[str, Any]) -> None:
        config = getattr(self.model, "config", None)
        for name in _INSIDE:
            if kwargs.get(name) or (kwargs.get(name) is None and getattr(config, name, False)):
                raise LayoutError(
                    f"{name}: what blocks return stays split over the mesh and cannot be handed out; leave it out"
                )
        if kwargs.get("inputs_embeds") is not None and self._splits_stream:
            raise LayoutError(
                f"inputs_embeds cannot be used in mode {self.mode.name!r}, where the embedding also splits the residual "
                f"stream: give input_ids"
            )

    def _drop_mask(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """A mask that masks nothing is left out: attention is faster without."""
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask == 1).all()):
            return {**kwargs, "attention_mask": None}
        return kwargs

    def _cut_rows(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Masks and positions that differ by row: the rows of this rank's sequences."""
        if not self._attended and not self._stream:
            return kwargs
        made = dict(kwargs)
        for name in ("attention_mask", "position_ids"):
            value = kwargs.get(name)
            if not isinstance(value, Tensor) or value.shape[0] != self._padded:
                continue
            if self._attended != self._stream:
                raise LayoutError(
                    f"an {name} that differs by row cannot be used in mode {self.mode.name!r}, where attention has other "
                    f"rows than the stream: leave it out, pad on the right and give padding the label {_IGNORED} (causal "
                    f"attention never looks at it)"
                )
            made[name] = take_block(value, self.mesh, 0, self._attended)
        return made

    def _pad(self, value: Any, *, ignored: bool) -> Any:
        """More rows, copies of the last: whatever the model computes of them is as tame as what it computes of that."""
        if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != self._rows:
            return value
        more = value[-1:].expand(self._padded - self._rows, *value.shape[1:])
        return torch.cat([value, torch.full_like(more, _IGNORED) if ignored else more])

    # -- out ----------------------------------------------------------------------------------------------------

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.hidden:
            output = _map_tensors(self._join, output)
        if self._rows == self._padded:
            return output
        if self.loss and self.heads and not self.heads[0].gather_output:
            return output
        return _map_tensors(self._cut, output)

    def _join(self, value: Tensor) -> Tensor:
        if value.dim() < 2 or value.shape[-1] * self.mesh.size(*self._columns) != self.hidden:
            return value
        return self._join_rows(self._join_columns(value))

    def _cut(self, value: Tensor) -> Tensor:
        if value.dim() == 0:
            raise LayoutError(
                f"a batch of {self._rows} had to be filled up to {self._padded} rows for mode {self.mode.name!r}, but the "
                f"model computes a scalar of them by itself: make the batch a multiple of {self.padded_rows(1, 1)}, or let "
                f"the model return its logits"
            )
        return value[: self._rows] if value.shape[0] == self._padded else value


def _map_tensors(change: Callable[[Tensor], Tensor], output: Any) -> Any:
    """A model's output with its tensors changed: a tensor, a tuple or list, a mapping or a dataclass."""
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, tuple | list):
        changed = [change(value) if isinstance(value, Tensor) else value for value in output]
        return type(output)(*changed) if hasattr(output, "_fields") else type(output)(changed)
    if isinstance(output, Mapping):
        for name, value in output.items():
            if isinstance(value, Tensor):
                output[name] = change(value)  # type: ignore[index]
    else:
        for name, value in getattr(output, "__dict__", {}).items():
            if isinstance(value, Tensor):
                object.__setattr__(output, name, change(value))  # it may be a frozen dataclass
    return output


def _is_labels(args: tuple[Any, ...]) -> bool:
    """Whether a second positional argument looks like labels: integers of the shape of the ids."""
    return (
        len(args) > 1
        and isinstance(args[0], Tensor)
        and isinstance(args[1], Tensor)
        and args[0].shape == args[1].shape
        and args[1].dtype == torch.int64 == args[0].dtype
    )
