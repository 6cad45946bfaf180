"""How the results of sharded layers lie, for the forward in which a model's own code is looked at.

See :mod:`meshfold.mesh.tracking`. Between layers the stream is ``.. h`` of the mode's residual layout, what column layers
write ``.. n`` of its hidden layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from meshfold.mesh import Mesh
from meshfold.mesh.tracking.call import is_constant
from meshfold.mesh.tracking.dims import (
    Dims,
    axes_of,
    block,
    is_split,
    is_unknown,
    size_of,
    unknown,
    whole,
    whole_dims,
)
from meshfold.mesh.tracking.follow import Tracker
from meshfold.mesh.tracking.rows import EXCHANGED
from meshfold.tensor_parallel.layers.base import OnMesh, ShardedLayer
from meshfold.tensor_parallel.layers.dropout import Dropout
from meshfold.tensor_parallel.layers.embedding import Embedding, HeadBias, PositionEmbedding
from meshfold.tensor_parallel.layers.linear import Linear
from meshfold.tensor_parallel.layers.norm import HeadNorm, LayerNorm, RMSNorm
from meshfold.tensor_parallel.layers.patch import PatchEmbedding
from meshfold.tensor_parallel.modes import Mode
from meshfold.tensor_parallel.streams import Axes, real, rows, stream_rows, tokens


class Tracked(OnMesh):
    """What a model that was split over tensor axes says to :func:`meshfold.mesh.tracking.watch`."""

    def __init__(self, mesh: Mesh, mode: Mode) -> None:
        self.mesh, self.mode = mesh, mode

    def begin(self, found: Tracker, model: nn.Module, given: Mapping[str, Any]) -> None:
        """What a model is given is whole on every tensor axis."""
        # They ask whether all of a mask is ones, so as to leave it out: each rank may do so for its own rows.
        found.overlooked = ("transformers/masking_utils.py", "transformers/cache_utils.py")

    def takes(self, module: nn.Module) -> bool:
        """Whether a module is a layer of ours."""
        return isinstance(module, ShardedLayer) or (
            isinstance(module, OnMesh) and isinstance(module, nn.Module)
        )

    def returned(
        self, found: Tracker, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        """Say how what a layer returned lies."""
        given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        first = output[0] if isinstance(output, tuple) else output
        if given is None or not isinstance(first, Tensor):
            return
        found.mark(first, self._result(found, module, given, found.dims(given), first))
        if isinstance(module, Linear):
            self._rows_of(found, module, given, first)

    def remedy(self, name: str, axes: tuple[str, ...]) -> str:
        """Keep the module whole, or split something else."""
        if not set(axes) & set(self.mode.axes):
            return ""
        parts = name.split(".")
        pattern = ".".join("*" if part.isdigit() else part for part in parts)
        rule = (
            f"Keep the module whole on every rank: rules={{{pattern!r}: 'replicate'}}"
            if name
            else "Put that code in a submodule and keep it whole on every rank: rules={'its_name': 'replicate'}"
        )
        residual = self.mode.layout("residual")
        splits = set(real(self.mesh, residual["h"])) & set(axes)
        if splits:
            return f"{rule}; write norms as nn.LayerNorm or nn.RMSNorm; or use mode '1d', in which the stream is whole"
        if set(real(self.mesh, residual["m"])) & set(axes):
            return f"{rule}; or use mode '1d', in which every rank has all tokens"
        return f"{rule}; or use a spec without tensor"

    def _result(self, found: Tracker, module: nn.Module, given: Tensor, dims: Dims, out: Tensor) -> Dims:
        shape = tuple(out.shape)
        if isinstance(module, Linear):
            return self._linear(found, module, given, dims, shape)
        if isinstance(module, Embedding):
            residual = module.mode.layout("residual")
            lead = rows(found, module.mesh, dims, shape[:-1], (), residual["m"])
            return (*lead, block(shape[-1], real(module.mesh, residual["h"]), grain=-1))
        if isinstance(module, PositionEmbedding):
            return self._positions(found, module, given, dims, shape)
        if isinstance(module, LayerNorm | RMSNorm):
            self._check(found, module, given, dims, module.columns)
            return (*dims[:-1], block(shape[-1], real(module.mesh, module.columns), grain=-1))
        if isinstance(module, HeadNorm):
            self._check(found, module, given, dims, ())
            return dims
        if isinstance(module, Dropout):
            return dims
        if isinstance(module, PatchEmbedding):
            residual = module.mode.layout("residual")
            first, second = (
                block(n, real(module.mesh, residual[d])) for n, d in zip(shape[:2], "mh", strict=True)
            )
            return (first, second, *whole_dims(shape[2:]))
        if isinstance(module, HeadBias):
            return (*dims, block(shape[-1], real(module.mesh, self.mode.layout("hidden")["n"])))
        if isinstance(module, nn.MultiheadAttention):
            return dims
        return whole_dims(shape)

    def _linear(
        self, found: Tracker, layer: Linear, given: Tensor, dims: Dims, shape: tuple[int, ...]
    ) -> Dims:
        mesh = layer.mesh
        reads_m, reads_k, writes_m, writes_n = self._axes_of(layer)
        entered = bool(given.dim()) and any(is_unknown(dim) for dim in dims)
        if not entered:
            self._check(found, layer, given, dims, reads_k)
        if layer.gather_output:
            lead = rows(found, mesh, dims[:-1], shape[:-1], ("",), ())
            return (*lead, whole(shape[-1]))
        moves = real(mesh, reads_m) != real(mesh, writes_m)
        if moves and len(dims) > 2 and is_unknown(dims[0]) and not is_unknown(dims[-1]):
            lead = tuple(map(unknown, shape[:-1]))
        elif entered or (
            layer.plan.entered and layer._enter_input is None
        ):  # only the mode tells how it lies
            lead = tuple(tokens(found, mesh, n, writes_m, None) for n in shape[:-1])
            if len(shape) > 2:
                lead = stream_rows(found, shape[:-1], real(mesh, writes_m), found.rows.dims(given))
        elif self._is_turned(dims, reads_m, writes_m):
            lead = tuple(map(unknown, shape[:-1]))
        else:
            lead = rows(found, mesh, dims[:-1], shape[:-1], reads_m, writes_m)
        axes = real(mesh, writes_n)
        blocks = mesh.size(*axes)
        parts = tuple(max(1, part.size * part.repeat // blocks) for part in layer.parts)
        if sum(parts) != shape[-1]:
            parts = ()
        return (*lead, block(shape[-1], axes, parts, layer.head_dim or -1))

    def _rows_of(self, found: Tracker, layer: Linear, given: Tensor, out: Tensor) -> None:
        """Say where a linear layer's output has the rows of the batch."""
        if out.dim() < given.dim():
            found.rows.flattened(out, given)
        reads, _, writes, _ = self._axes_of(layer)
        turned = given.dim() > 2 and not is_split(found.rows.dims(given)[0])
        if turned and real(self.mesh, reads) != real(self.mesh, writes):
            found.rows.lose(out, EXCHANGED)

    def _axes_of(self, layer: Linear) -> tuple[Axes, Axes, Axes, Axes]:
        """The axes that split tokens and columns of what a layer reads, and of what it writes."""
        residual, hidden = layer.mode.layout("residual"), layer.mode.layout("hidden")
        between: Mapping[str, tuple[Axes, Axes, Axes, Axes]] = {
            "column": (residual["m"], residual["h"], hidden["m"], hidden["n"]),
            "row": (hidden["m"], hidden["n"], residual["m"], residual["h"]),
            "head": (
                residual["m"],
                residual["h"],
                layer.mode.layout("logits")["m"],
                layer.mode.layout("logits")["v"],
            ),
            "stem": ((), (), residual["m"], residual["h"]),
        }
        plan = layer.plan
        return between.get(
            layer.role.removeprefix("tied_"),
            (plan.x[plan.m], plan.x[plan.k], plan.y[plan.m], plan.y[plan.n]),
        )

    def _positions(
        self, found: Tracker, table: PositionEmbedding, ids: Tensor, dims: Dims, shape: tuple[int, ...]
    ) -> Dims:
        columns = real(table.mesh, table.mode.layout("residual")["h"])
        lead = dims
        if len(dims) > 1 and not is_split(dims[0]) and size_of(dims[0]) > 1 and is_constant(ids, 0):
            lead = (unknown(size_of(dims[0])), *dims[1:])
        if table.flat_tokens:
            lead = tuple(tokens(found, table.mesh, n, table.tokens, dims) for n in shape[:-1])
        elif tuple(map(size_of, dims)) != shape[:-1]:
            lead = (block(shape[0], real(table.mesh, table.tokens)), *dims[1:])
        return (*lead, block(shape[-1], columns, grain=-1))

    def _check(self, found: Tracker, layer: nn.Module, given: Tensor, dims: Dims, columns: Axes) -> None:
        """The last dim of what a layer is given must lie as it expects."""
        wanted = real(self.mesh, columns)
        if not dims or is_unknown(dims[-1]) or axes_of(dims[-1]) == wanted:
            return
        if not is_split(
            dims[-1]
        ):  # the layer's own weights fit nothing but a piece: whose it is was not followed
            return
        have = ", ".join(axes_of(dims[-1])) or "nothing"
        want = ", ".join(wanted) or "nothing"
        found.refuse(
            type(layer).__name__,
            f"is given a tensor whose last dim is split over {have}, where it reads one that is split over {want}",
            given,
            axes=(*axes_of(dims[-1]), *wanted),
        )

    def _is_turned(self, dims: Dims, reads: Axes, writes: Axes) -> bool:
        """Whether a layer that gathers or scatters tokens is given them along another dim than the first.

        The layer behind it undoes what it does; in between nothing is known.
        """
        reads, writes = real(self.mesh, reads), real(self.mesh, writes)
        return reads != writes and any(set(axes_of(dim)) & {*reads, *writes} for dim in dims[1:-1])
