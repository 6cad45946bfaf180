"""Split dims of a tensor, found by its shape: rows and columns of the residual stream, in any order of dims.

Most modules get ``b s h``. Torch's own attention and recurrent layers take ``s b h`` without ``batch_first=True``. A linear
layer over tokens takes ``b h s``, and so does a convolution over a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Size, Tensor, nn

from meshfold.mesh import LayoutError
from meshfold.tensor_parallel.layers.base import BatchShape
from meshfold.tensor_parallel.module_kinds import features, is_linear

_TORCHS_OWN = (
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
)


@dataclass(frozen=True)
class StreamDims:
    """Split dims of a tensor.

    Attributes:
        rows: the dim of the batch, or of tokens; None: it has all rows.
        columns: the dim of the stream's features, from the front or -1; None: it has all of them.
    """

    rows: int | None
    columns: int | None


def sequence_first(module: nn.Module) -> bool:
    """Return True if a module is one of torch's own that takes ``s b h``, explicitly or by default."""
    if isinstance(module, _TORCHS_OWN):
        inner = next((m for m in module.modules() if isinstance(m, nn.MultiheadAttention)), None)
        return inner is not None and not inner.batch_first
    return isinstance(module, nn.MultiheadAttention | nn.RNNBase) and not module.batch_first


class DimFinder:
    """Finder of the split dims of a module's input tensors."""

    def __init__(self, module: nn.Module, batch: BatchShape, hidden: int, row_blocks: int, column_blocks: int) -> None:
        """Args:
        module: its class or sizes may show which tensors it takes.
        batch: of the forward that runs.
        hidden: size of the whole stream.
        row_blocks, column_blocks: into how many its rows and its columns are split.
        """
        self._batch, self._local = batch, hidden // column_blocks
        self._row_blocks, self._column_blocks = row_blocks, column_blocks
        self._sequence_first, self._kind = sequence_first(module), type(module).__name__
        self._whole_last = features(module)[0] if is_linear(module) else 0
        self._channels = module.in_channels if isinstance(module, nn.modules.conv._ConvNd) else 0

    def find(self, x: Tensor) -> StreamDims:
        """Find which dims of a module's input are batch and sequence.

        Raises:
            LayoutError: for a module that takes the sequence first, if it gets neither all rows nor this rank's; for a shape that
                fits both orders.
        """
        columns = self._columns(x.shape)
        if columns is None and self._column_blocks > 1 and not self._local_rows(x.shape):
            return StreamDims(None, None)  # whole, or not from the stream
        if columns is None and self._column_blocks == 1 and self._is_other(x.shape):
            return StreamDims(None, None)
        return StreamDims(self._rows(x.shape), columns)

    def _columns(self, shape: Size) -> int | None:
        if self._column_blocks == 1:
            return None
        if self._channels:
            return 1 if len(shape) > 2 and shape[1] == self._local != self._channels else None
        if self._whole_last != shape[-1] and shape[-1] == self._local:
            return -1
        if len(shape) != 3 or shape[1] != self._local:
            return None
        # A linear layer over tokens, or a user's module with features in the middle dim.
        if shape[1] != self._batch.length:
            return 1
        if shape[-1] != self._batch.length:
            return None  # the middle dim is the sequence
        raise LayoutError(
            f"{self._kind} was given {tuple(shape)}: with sequences as long as a rank's share of the features, {self._local}, "
            f"the shape does not tell which dim is which. Use sequences of another length, or a spec with whole features"
        )

    def _local_rows(self, shape: Size) -> bool:
        """Return True if a tensor without the stream's features has this rank's rows."""
        rows = self._batch.rows // self._row_blocks
        first = 1 if self._sequence_first and len(shape) > 2 else 0
        return self._row_blocks > 1 and rows > 0 and shape[first] == rows

    def _is_other(self, shape: Size) -> bool:
        """Return True if a tensor has neither the stream's width nor its rows, in a spec that does not split features."""
        wide = shape[-1] == self._local or (len(shape) > 2 and shape[1] == self._local)
        return not wide and not self._local_rows(shape)

    def _rows(self, shape: Size) -> int | None:
        if self._row_blocks == 1:
            return None
        whole = self._batch.rows
        local = whole // self._row_blocks
        if len(shape) < 3 or not whole:
            return 0
        if self._sequence_first:
            if shape[1] == local:
                return 1
            if shape[1] == whole:  # the ids were s b, so the sequence was split
                return 0
            raise LayoutError(
                f"{self._kind} takes the sequence first and was given {tuple(shape)}, of a batch of {whole} rows of which this "
                f"rank has {local}: give it s b h, or make it with batch_first=True"
            )
        if shape[0] != local and shape[1] == local and shape[0] == self._batch.length:
            return 1
        return 0
