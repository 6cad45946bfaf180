"""Layouts of the results of sharded layers, for the forward in which a model's own code is tracked.

See :mod:`meshfold.mesh.tracking`. Between layers the stream is ``.. h`` of the mode's residual layout, what column layers
write ``.. n`` of its hidden layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from meshfold.mesh import Mesh, metadata
from meshfold.mesh.tracking import (
    ALIKE,
    TOKENS_EXCHANGED,
    Dims,
    Factor,
    Tracker,
    axes_in,
    axes_of,
    block,
    is_open,
    is_split,
    is_split_first,
    is_unknown,
    size_of,
    whole_dims,
)
from meshfold.tensor_parallel.convert.boundary import Boundary
from meshfold.tensor_parallel.convert.stream_layout import (
    Axes,
    check_stream,
    describe,
    joined_rows,
    output_rows,
    spanning_axes,
    stream_rows,
    token_dim,
)
from meshfold.tensor_parallel.layers.base import OnMesh, ShardedLayer
from meshfold.tensor_parallel.layers.dropout import Dropout
from meshfold.tensor_parallel.layers.embedding import Embedding, HeadBias, PatchEmbedding, PositionEmbedding
from meshfold.tensor_parallel.layers.linear import Linear
from meshfold.tensor_parallel.layers.loss import CausalLMLoss
from meshfold.tensor_parallel.layers.norm import HeadNorm, LayerNorm, RMSNorm
from meshfold.tensor_parallel.modes import Mode


class LayerTracking(OnMesh):
    """Callbacks of a split model for :func:`meshfold.mesh.tracking.track_forwards`."""

    def __init__(self, mesh: Mesh, mode: Mode, kept: Sequence[str], boundaries: Sequence[Boundary]) -> None:
        """Args:
        kept: full names of the modules that are kept whole.
        boundaries: of its lists of blocks.
        """
        self.mesh, self.mode, self.kept, self.boundaries = mesh, mode, frozenset(kept), boundaries

    def begin(self, found: Tracker, model: nn.Module, given: Mapping[str, Any]) -> None:
        """Mark the model's inputs: whole on every tensor axis."""
        # These test if a mask is all ones, to drop it; each rank may decide that for its own rows.
        layers = [module for module in model.modules() if self.communicates(module)]
        # Other modules may compute with shards of their own parameters, if hooks sum their results.
        ours = {id(p) for layer in layers for p in layer.parameters(recurse=False)}
        found.records.placed = lambda parameter: self._placed(parameter) if id(parameter) in ours else None
        found.random_axes = (*found.random_axes, *spanning_axes(self.mesh, self.mode.axes))
        found.overlooked = ("transformers/masking_utils.py", "transformers/cache_utils.py")

    def _placed(self, parameter: Tensor) -> Dims | None:
        """Return the layout of a parameter that a sharded layer has split; other code that reads it gets a shard."""
        meta = metadata(parameter)
        axes = () if meta is None else meta.placement.axes
        if len(axes) != parameter.dim():
            return None
        split = [
            spanning_axes(self.mesh, tuple(axis for axis in several if axis in self.mode.axes)) for several in axes
        ]
        if not any(split):
            return None
        assert meta is not None
        made = []
        for number, (size, mine) in enumerate(zip(parameter.shape, split, strict=True)):
            lengths = tuple(length for _, length in meta.placement.segments(self.mesh, number))
            parts = lengths if number in meta.placement.parts and sum(lengths) == size else ()
            made.append(block(size, mine, parts, grain=-1))
        return tuple(made)

    def communicates(self, module: nn.Module) -> bool:
        """Return True if a module is a sharded layer."""
        return isinstance(module, ShardedLayer) or (isinstance(module, OnMesh) and isinstance(module, nn.Module))

    def check_arguments(
        self, found: Tracker, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Refuse a tensor without the layout that a layer reads."""
        given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        if given is None:
            return
        dims = found.dims(given)
        if isinstance(module, Linear):
            (reads_m, reads_k), _ = _between(module)
            if not _is_handed(module, dims) and not _is_concatenated(module, dims):
                self._check(found, module, given, dims, reads_k)
            if module.gather_output:
                check_stream(found, module.mesh, given, reads_m, reads_k, type(module).__name__)
        elif isinstance(module, LayerNorm | RMSNorm):
            self._check(found, module, given, dims, module.columns)
        elif isinstance(module, HeadNorm):
            self._check(found, module, given, dims, ())
        elif isinstance(module, CausalLMLoss):
            logits = module.mode.layout("logits")
            check_stream(found, module.mesh, given, logits["m"], logits["v"], type(module).__name__)

    def mark_results(
        self, found: Tracker, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        """Mark the layout of a layer's result."""
        given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        first = output[0] if isinstance(output, tuple) else output
        if given is None or not isinstance(first, Tensor):
            return
        found.mark(first, self._result(found, module, given, found.dims(given), first))
        self._check_sums(found, module, given, first)
        if isinstance(module, Linear):
            self._rows_of(found, module, given, first)

    def remedy(self, name: str, axes: tuple[str, ...]) -> str:
        """Return advice: keep the module whole, or split something else."""
        if not set(axes) & set(self.mode.axes):
            return ""
        for boundary in self.boundaries:
            if boundary.inside and boundary.name and not f"{name}.".startswith(f"{boundary.name}."):
                return boundary.order()
        while any(name == kept or name.startswith(f"{kept}.") for kept in self.kept):
            name = name.rpartition(".")[0]  # already whole: name the module around it
        parts = name.split(".")
        pattern = ".".join("*" if part.isdigit() else part for part in parts)
        rule = (
            f"Keep the module whole on every rank: rules={{{pattern!r}: 'replicate'}}"
            if name
            else "Put that code in a submodule and keep it whole on every rank: rules={'its_name': 'replicate'}"
        )
        residual = self.mode.layout("residual")
        splits = set(spanning_axes(self.mesh, residual["h"])) & set(axes)
        if splits:
            return f"{rule}; write norms as nn.LayerNorm or nn.RMSNorm; or use mode '1d', in which the stream is whole"
        if set(spanning_axes(self.mesh, residual["m"])) & set(axes):
            return f"{rule}; or use mode '1d', in which every rank has all tokens"
        return f"{rule}; or use a spec without tensor"

    def _result(self, found: Tracker, module: nn.Module, given: Tensor, dims: Dims, out: Tensor) -> Dims:
        shape = tuple(out.shape)
        if isinstance(module, Linear):
            return self._linear(found, module, given, dims, shape)
        if isinstance(module, Embedding):
            residual = module.mode.layout("residual")
            lead = output_rows(found, module.mesh, dims, shape[:-1], (), residual["m"])
            return (*lead, block(shape[-1], spanning_axes(module.mesh, residual["h"]), grain=-1))
        if isinstance(module, PositionEmbedding):
            return self._positions(found, module, given, dims, shape)
        if isinstance(module, LayerNorm | RMSNorm):
            return (*dims[:-1], block(shape[-1], spanning_axes(module.mesh, module.columns), grain=-1))
        if isinstance(module, HeadNorm | Dropout):
            return dims
        if isinstance(module, PatchEmbedding):
            residual = module.mode.layout("residual")
            first, second = (
                block(n, spanning_axes(module.mesh, residual[d])) for n, d in zip(shape[:2], "mh", strict=True)
            )
            return (first, second, *whole_dims(shape[2:]))
        if isinstance(module, HeadBias):
            return (*dims, block(shape[-1], spanning_axes(module.mesh, self.mode.layout("hidden")["n"])))
        if isinstance(module, nn.MultiheadAttention):
            return dims
        return whole_dims(shape)

    def _linear(self, found: Tracker, layer: Linear, given: Tensor, dims: Dims, shape: tuple[int, ...]) -> Dims:
        (reads_m, _), (writes_m, writes_n) = _between(layer)
        handed = _is_handed(layer, dims)
        if layer.gather_output:
            return joined_rows(found, layer.mesh, dims, shape)
        mesh = layer.mesh
        if handed and len(shape) > 2:
            lead = stream_rows(found, shape[:-1], spanning_axes(mesh, writes_m), found.rows.dims(given))
        elif handed:
            lead = tuple(token_dim(found, mesh, n, writes_m, None) for n in shape[:-1])
        else:
            lead = output_rows(found, mesh, dims[:-1], shape[:-1], reads_m, writes_m)
        axes = spanning_axes(mesh, writes_n)
        blocks = mesh.size(*axes)
        parts = tuple(max(1, part.size * part.repeat // blocks) for part in layer.parts)
        if sum(parts) != shape[-1]:
            parts = ()
        return (*lead, block(shape[-1], axes, parts, layer.head_dim or -1))

    def _rows_of(self, found: Tracker, layer: Linear, given: Tensor, out: Tensor) -> None:
        """Mark the dims of a linear layer's output that have the rows of the batch."""
        if out.dim() < given.dim():
            found.rows.flattened(out, given)
        (reads, _), (writes, _) = _between(layer)
        turned = given.dim() > 2 and not is_split(found.rows.dims(given)[0])
        if turned and spanning_axes(self.mesh, reads) != spanning_axes(self.mesh, writes):
            found.rows.lose(out, TOKENS_EXCHANGED)

    def _positions(
        self, found: Tracker, table: PositionEmbedding, ids: Tensor, dims: Dims, shape: tuple[int, ...]
    ) -> Dims:
        columns = spanning_axes(table.mesh, table.mode.layout("residual")["h"])
        lead = dims
        if len(dims) > 1 and not is_split(dims[0]) and size_of(dims[0]) > 1 and found.records.is_alike(ids, 0):
            lead = ((Factor(size_of(dims[0]), ALIKE),), *dims[1:])
        if table.flat_tokens:
            lead = tuple(token_dim(found, table.mesh, n, table.tokens, dims) for n in shape[:-1])
        elif tuple(map(size_of, dims)) != shape[:-1]:
            lead = (block(shape[0], spanning_axes(table.mesh, table.tokens)), *dims[1:])
        return (*lead, block(shape[-1], columns, grain=-1))

    def _check(self, found: Tracker, layer: nn.Module, given: Tensor, dims: Dims, columns: Axes) -> None:
        """Refuse an input whose last dim does not have the layout that the layer reads."""
        wanted = spanning_axes(self.mesh, columns)
        if not dims or (is_split_first(dims[-1], wanted) and axes_of(dims[-1]) == wanted and not is_open(dims[-1])):
            return
        want = ", ".join(wanted) or "nothing"
        found.refuse(
            type(layer).__name__,
            f"is given a tensor whose last dim {describe(dims[-1])}, where it reads one that is split over {want}",
            given,
            axes=(*axes_of(dims[-1]), *wanted),
        )

    def _check_sums(self, found: Tracker, layer: nn.Module, given: Tensor, out: Tensor) -> None:
        """Refuse an input that is replicated along axes over which the layer sums its gradients.

        Raises:
            LayoutError: if it needs a gradient, whose parts would not add up.
        """
        mine = found.records.summed(given) - axes_in(found.dims(given))
        reads, writes = ((), ()) if _is_handed(layer, found.dims(given)) else _token_axes(layer) or (mine, mine)
        reads, writes = (set(spanning_axes(self.mesh, tuple(axes))) for axes in (reads, writes))
        lacking = reads - axes_in(found.dims(given))
        if lacking != mine and given.requires_grad and any(p.requires_grad for p in layer.parameters()):
            axes = tuple(sorted(lacking ^ mine))
            found.refuse(
                type(layer).__name__,
                f"is given a tensor that is the same on every rank along {', '.join(axes)}, where it reads the stream: the parts "
                "of its gradient would not add up",
                given,
                axes=axes,
            )
        found.records.sum_over([out], writes - axes_in(found.dims(out)))


def _is_handed(layer: nn.Module, dims: Dims) -> bool:
    """Return True if a region's code calls the layer with the region's input, whose layout only the mode determines."""
    return isinstance(layer, Linear) and layer.plan.entered and all(map(is_unknown, dims))


def _is_concatenated(layer: Linear, dims: Dims) -> bool:
    """Return True if a layer that reads several concatenated outputs is given this rank's shard of each, in order."""
    if not layer.input_parts or not dims or len(dims[-1]) != 1 or dims[-1][0].split is None:
        return False
    axes = spanning_axes(layer.mesh, layer.plan.x[layer.plan.k])
    shards = tuple(part.size // layer.mesh.size(*axes) for part in layer.input_parts)
    return axes_of(dims[-1]) == axes and dims[-1][0].parts == shards


def _token_axes(layer: nn.Module) -> tuple[Iterable[str], Iterable[str]] | None:
    """Return the axes that split the tokens of a layer's input and output; None for a layer without weights."""
    if isinstance(layer, Linear):
        (reads, _), (writes, _) = _between(layer)
        return reads, writes
    if isinstance(layer, LayerNorm | RMSNorm):
        return layer.tokens, layer.tokens
    if isinstance(layer, HeadNorm | HeadBias):
        return layer.summed, layer.summed
    if isinstance(layer, PositionEmbedding):
        return (), layer.tokens
    return None if isinstance(layer, Dropout) else ((), ())


def _between(layer: Linear) -> tuple[tuple[Axes, Axes], tuple[Axes, Axes]]:
    """Return the axes of tokens and features of a linear layer's input and output."""
    residual, hidden, logits = (layer.mode.layout(name) for name in ("residual", "hidden", "logits"))
    stream, inner = (residual["m"], residual["h"]), (hidden["m"], hidden["n"])
    plan = layer.plan
    known = {
        "column": (stream, inner),
        "row": (inner, stream),
        "head": (stream, (logits["m"], logits["v"])),
        "stem": (((), ()), stream),
    }
    itself = ((plan.x[plan.m], plan.x[plan.k]), (plan.y[plan.m], plan.y[plan.n]))
    return known.get(layer.role.removeprefix("tied_"), itself)
