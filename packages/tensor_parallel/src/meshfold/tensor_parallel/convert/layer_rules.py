"""A rule for each sharded layer: the layout that it reads and writes, for :mod:`meshfold.mesh.tracking`.

Between layers the stream is ``.. h`` of the mode's residual layout, what column layers write ``.. n`` of its hidden layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from meshfold.mesh.tracking import (
    ALIKE,
    TOKENS_EXCHANGED,
    Dims,
    Factor,
    Tracker,
    axes_of,
    block,
    is_open,
    is_split,
    is_split_first,
    is_unknown,
    size_of,
    whole,
    whole_dims,
)
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
from meshfold.tensor_parallel.layers.dropout import Dropout
from meshfold.tensor_parallel.layers.embedding import Embedding, HeadBias, PatchEmbedding, PositionEmbedding
from meshfold.tensor_parallel.layers.linear import Linear
from meshfold.tensor_parallel.layers.loss import CausalLMLoss
from meshfold.tensor_parallel.layers.norm import HeadNorm, HeadNorms, LayerNorm, RMSNorm

Layer = TypeVar("Layer", bound=nn.Module)
Shape = tuple[int, ...]


class LayerRule(Generic[Layer]):
    """Rule of a layer that takes any tensor and returns one that is whole on every rank."""

    def check(self, found: Tracker, layer: Layer, given: Tensor) -> None:
        """Refuse an input without the layout that the layer reads.

        Raises:
            LayoutError: if the input has another.
        """

    def result(self, found: Tracker, layer: Layer, given: Tensor, shape: Shape) -> Dims:
        """Return the layout of the layer's output, from its input and the output's shape."""
        return whole_dims(shape)

    def mark_rows(self, found: Tracker, layer: Layer, given: Tensor, out: Tensor) -> None:
        """Mark the dims of the output that have the rows of the batch, where the layer changes them."""

    def token_axes(self, layer: Layer) -> tuple[Iterable[str], Iterable[str]] | None:
        """Return the axes that split the tokens of the layer's input and output; None for a layer without weights."""
        return (), ()

    def reads_region(self, layer: Layer, dims: Dims) -> bool:
        """Return True if a region's code calls the layer with the region's input, whose layout only the mode determines."""
        return False


class LinearRule(LayerRule[Linear]):
    """Rule of a linear layer, by its role in the block."""

    def check(self, found: Tracker, layer: Linear, given: Tensor) -> None:
        dims = found.dims(given)
        (reads_m, reads_k), _ = self._ends(layer)
        if not self.reads_region(layer, dims) and not self._is_concatenated(layer, dims):
            _check_columns(found, layer, given, reads_k)
        if layer.gather_output:
            check_stream(found, layer.mesh, given, reads_m, reads_k, type(layer).__name__)

    def result(self, found: Tracker, layer: Linear, given: Tensor, shape: Shape) -> Dims:
        mesh, dims = layer.mesh, found.dims(given)
        (reads_m, _), (writes_m, writes_n) = self._ends(layer)
        in_region = self.reads_region(layer, dims)
        if layer.gather_output:
            return joined_rows(found, mesh, dims, shape)
        if in_region and len(shape) > 2:
            lead = stream_rows(found, shape[:-1], spanning_axes(mesh, writes_m), found.rows.dims(given))
        elif in_region:
            lead = tuple(token_dim(found, mesh, n, writes_m, None) for n in shape[:-1])
        else:
            lead = output_rows(found, mesh, dims[:-1], shape[:-1], reads_m, writes_m)
        axes = spanning_axes(mesh, writes_n)
        blocks = mesh.size(*axes)
        parts = tuple(max(1, part.size * part.repeat // blocks) for part in layer.parts)
        if sum(parts) != shape[-1]:
            parts = ()
        return (*lead, block(shape[-1], axes, parts, layer.head_dim or -1))

    def mark_rows(self, found: Tracker, layer: Linear, given: Tensor, out: Tensor) -> None:
        if out.dim() < given.dim():
            found.rows.flattened(out, given)
        (reads, _), (writes, _) = self._ends(layer)
        turned = given.dim() > 2 and not is_split(found.rows.dims(given)[0])
        if turned and spanning_axes(layer.mesh, reads) != spanning_axes(layer.mesh, writes):
            found.rows.lose(out, TOKENS_EXCHANGED)

    def token_axes(self, layer: Linear) -> tuple[Iterable[str], Iterable[str]]:
        (reads, _), (writes, _) = self._ends(layer)
        return reads, writes

    def reads_region(self, layer: Linear, dims: Dims) -> bool:
        return layer.plan.entered and all(map(is_unknown, dims))

    @staticmethod
    def _is_concatenated(layer: Linear, dims: Dims) -> bool:
        """Return True if a layer that reads several concatenated outputs is given this rank's shard of each, in order."""
        if not layer.input_parts or not dims or len(dims[-1]) != 1 or dims[-1][0].split is None:
            return False
        axes = spanning_axes(layer.mesh, layer.plan.x[layer.plan.k])
        shards = tuple(part.size // layer.mesh.size(*axes) for part in layer.input_parts)
        return axes_of(dims[-1]) == axes and dims[-1][0].parts == shards

    @staticmethod
    def _ends(layer: Linear) -> tuple[tuple[Axes, Axes], tuple[Axes, Axes]]:
        """Return the axes of tokens and features of the layer's input and output."""
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


class EmbeddingRule(LayerRule[Embedding]):
    """Rule of a table of tokens: it writes the stream."""

    def result(self, found: Tracker, layer: Embedding, given: Tensor, shape: Shape) -> Dims:
        residual = layer.mode.layout("residual")
        lead = output_rows(found, layer.mesh, found.dims(given), shape[:-1], (), residual["m"])
        return (*lead, block(shape[-1], spanning_axes(layer.mesh, residual["h"]), grain=-1))


class PositionRule(LayerRule[PositionEmbedding]):
    """Rule of a table of positions, whose ids may be the same for all rows of the batch."""

    def result(self, found: Tracker, layer: PositionEmbedding, given: Tensor, shape: Shape) -> Dims:
        mesh, dims = layer.mesh, found.dims(given)
        columns = spanning_axes(mesh, layer.mode.layout("residual")["h"])
        lead = dims
        if len(dims) > 1 and not is_split(dims[0]) and size_of(dims[0]) > 1 and found.records.is_alike(given, 0):
            lead = ((Factor(size_of(dims[0]), ALIKE),), *dims[1:])
        if layer.flat_tokens:
            lead = tuple(token_dim(found, mesh, n, layer.tokens, dims) for n in shape[:-1])
        elif tuple(map(size_of, dims)) != shape[:-1]:
            own = size_of(dims[0]) // mesh.size(*layer.tokens)  # rows; fewer if all have the same positions (BART)
            lead = (whole(1) if shape[0] == 1 < own else block(shape[0], spanning_axes(mesh, layer.tokens)), *dims[1:])
        return (*lead, block(shape[-1], columns, grain=-1))

    def token_axes(self, layer: PositionEmbedding) -> tuple[Iterable[str], Iterable[str]]:
        return (), layer.tokens


class PatchRule(LayerRule[PatchEmbedding]):
    """Rule of a convolution over patches: it writes the stream, images first and features second."""

    def result(self, found: Tracker, layer: PatchEmbedding, given: Tensor, shape: Shape) -> Dims:
        residual = layer.mode.layout("residual")
        first, second = (block(n, spanning_axes(layer.mesh, residual[d])) for n, d in zip(shape[:2], "mh", strict=True))
        return (first, second, *whole_dims(shape[2:]))


class NormRule(LayerRule[LayerNorm | RMSNorm]):
    """Rule of a norm of the stream, or of all heads together, which stay the heads that they are."""

    def check(self, found: Tracker, layer: LayerNorm | RMSNorm, given: Tensor) -> None:
        _check_columns(found, layer, given, layer.columns)

    def result(self, found: Tracker, layer: LayerNorm | RMSNorm, given: Tensor, shape: Shape) -> Dims:
        if layer.of_heads:
            return found.dims(given)
        return (*found.dims(given)[:-1], block(shape[-1], spanning_axes(layer.mesh, layer.columns), grain=-1))

    def token_axes(self, layer: LayerNorm | RMSNorm) -> tuple[Iterable[str], Iterable[str]]:
        return layer.tokens, layer.tokens


class HeadNormRule(LayerRule[HeadNorm | HeadNorms]):
    """Rule of a norm over one head: it takes any heads of any tokens; of a norm for each head."""

    def check(self, found: Tracker, layer: HeadNorm | HeadNorms, given: Tensor) -> None:
        _check_columns(found, layer, given, ())

    def result(self, found: Tracker, layer: HeadNorm | HeadNorms, given: Tensor, shape: Shape) -> Dims:
        return found.dims(given)

    def token_axes(self, layer: HeadNorm | HeadNorms) -> tuple[Iterable[str], Iterable[str]]:
        return layer.summed, layer.summed


class HeadBiasRule(LayerRule[HeadBias]):
    """Rule of a table of biases of scores: it writes this rank's heads."""

    def result(self, found: Tracker, layer: HeadBias, given: Tensor, shape: Shape) -> Dims:
        return (*found.dims(given), block(shape[-1], spanning_axes(layer.mesh, layer.mode.layout("hidden")["n"])))

    def token_axes(self, layer: HeadBias) -> tuple[Iterable[str], Iterable[str]]:
        return layer.summed, layer.summed


class DropoutRule(LayerRule[Dropout]):
    """Rule of dropout: it leaves the layout and has no weights."""

    def result(self, found: Tracker, layer: Dropout, given: Tensor, shape: Shape) -> Dims:
        return found.dims(given)

    def token_axes(self, layer: Dropout) -> None:
        return None


class AttentionRule(LayerRule[nn.MultiheadAttention]):
    """Rule of ``nn.MultiheadAttention``: its output lies as its queries."""

    def result(self, found: Tracker, layer: nn.MultiheadAttention, given: Tensor, shape: Shape) -> Dims:
        return found.dims(given)


class LossRule(LayerRule[CausalLMLoss]):
    """Rule of the loss: it reads the logits of the head."""

    def check(self, found: Tracker, layer: CausalLMLoss, given: Tensor) -> None:
        logits = layer.mode.layout("logits")
        check_stream(found, layer.mesh, given, logits["m"], logits["v"], type(layer).__name__)


_RULES: dict[type[nn.Module], LayerRule[Any]] = {
    Linear: LinearRule(),
    Embedding: EmbeddingRule(),
    PositionEmbedding: PositionRule(),
    PatchEmbedding: PatchRule(),
    LayerNorm: NormRule(),
    RMSNorm: NormRule(),
    HeadNorm: HeadNormRule(),
    HeadNorms: HeadNormRule(),
    HeadBias: HeadBiasRule(),
    Dropout: DropoutRule(),
    nn.MultiheadAttention: AttentionRule(),
    CausalLMLoss: LossRule(),
}
_ANY_LAYER: LayerRule[nn.Module] = LayerRule()


def rule_of(layer: nn.Module) -> LayerRule[Any]:
    """Return the rule of a layer's class, or of the nearest class that it is derived from."""
    return next((_RULES[kind] for kind in type(layer).__mro__ if kind in _RULES), _ANY_LAYER)


def _check_columns(found: Tracker, layer: Any, given: Tensor, columns: Axes) -> None:
    """Refuse an input whose last dim does not have the layout that the layer reads."""
    dims, wanted = found.dims(given), spanning_axes(layer.mesh, columns)
    if not dims or (is_split_first(dims[-1], wanted) and axes_of(dims[-1]) == wanted and not is_open(dims[-1])):
        return
    want = ", ".join(wanted) or "nothing"
    found.refuse(
        type(layer).__name__,
        f"receives a tensor whose last dim {describe(dims[-1])}, but needs one that is split over {want}",
        given,
        axes=(*axes_of(dims[-1]), *wanted),
    )
