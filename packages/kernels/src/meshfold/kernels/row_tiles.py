"""Sizes of the program that multiplies a row by a weight: those fast on an H100, or the fastest for the weights of a model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from meshfold.kernels.row_product import RowWeight

_WORD_BITS = {torch.uint8: 4, torch.int8: 8, torch.bfloat16: 16}
"""Bits of a weight, by the dtype of the tensor that has them."""
_LEAST_BYTES = 1 << 20
"""Bytes of the smallest weight whose tiles are measured."""
_MANY_BYTES = 3 << 27
"""Bytes of the weights that are read one after another: more than a GPU's cache has, so that they come from memory."""
_ROUNDS = 4


class Tile(NamedTuple):
    """Sizes of a program.

    Attributes:
        rows: outputs.
        columns: of the weight at a time.
        warps: of the program.
        stages: loads in flight by way of shared memory; 1 for none.
        words: the weight is read in words of eight bytes, one by each thread; ``columns`` are the words.
    """

    rows: int
    columns: int
    warps: int
    stages: int = 1
    words: bool = False


class RowCall(NamedTuple):
    """A product that a model makes: a layer, one that gates it, and gain and epsilon of a norm before both."""

    layer: RowWeight
    gate: RowWeight | None = None
    norm: tuple[Tensor, float] | None = None

    @property
    def columns(self) -> int:
        """Elements of its row."""
        return _columns(self.layer.weight)

    @property
    def bytes(self) -> int:
        """Bytes of its weights or codes."""
        return self.layer.weight.nbytes * (1 if self.gate is None else 2)

    def kind(self, dtype: torch.dtype) -> tuple[object, ...]:
        """Return what the best tile depends on, for rows of a dtype."""
        weight, scale = self.layer.weight, self.layer.scale
        groups = 0 if scale is None else scale.shape[1]
        return dtype, weight.dtype, *weight.shape, groups, self.layer.zero is None, self.gate is None, self.norm is None

    def word_bits(self, dtype: torch.dtype) -> int:
        """Return the bits of a weight, 0 if it cannot be read in words of eight bytes.

        Its rows, and its groups, must consist of words. The row, and a norm's gain, must have 16 bits an element: codes are
        multiplied by whole numbers of 16 bits.
        """
        group = group_of(self.layer)
        bits = _WORD_BITS.get(self.layer.weight.dtype, 0)
        narrow = dtype.itemsize == 2 and (self.norm is None or self.norm[0].dtype.itemsize == 2)
        if not bits or not narrow or (bits == 16) != (group == 0):
            return 0
        weights = [each.weight for each in (self.layer, self.gate) if each is not None]
        whole = all(w.data_ptr() % 8 == 0 and w.stride(0) * w.element_size() % 8 == 0 for w in weights)
        fits = self.columns % (64 // bits) == 0 and (group < 2 or group % (64 // bits) == 0)
        return bits if whole and fits else 0

    def tile(self, dtype: torch.dtype) -> Tile:
        """Return the tile for it: the measured one, or one by its shape."""
        return _measured.get(self.kind(dtype)) or self.known_tile()

    def known_tile(self) -> Tile:
        """Return the tile for a weight of its shape: the fastest that were tried on an H100 with the layers of an 8B model."""
        weight, gated = self.layer.weight, self.gate is not None
        n, k, size = weight.shape[0], self.columns, weight.element_size()
        power = 1 << max(k - 1, 0).bit_length()
        if n < 512:  # few outputs: a program for each
            return Tile(1, min(power, 2048), 4)
        if weight.dtype == torch.uint8:
            return Tile(16 if n >= 8192 else 8, 1024, 2)
        if size == 2 and self.norm is not None and power >= 2048:  # more rows share the normed row
            return Tile(4, 2048, 8) if gated else Tile(8, 1024, 4)
        if size > 1:
            wide = 2048 if size == 2 else 1024
            columns = min(wide, power)  # narrow where ranks split k: more rows, the same elements
            return Tile(min(2 * wide // columns, 8), columns, 4 if gated else 2)
        if weight.dtype == torch.int8 and group_of(self.layer) == 1:
            return Tile(4, 1024, 4 if gated else 2, 3)
        return Tile(4, 1024, 4)


_measured: dict[tuple[object, ...], Tile] = {}


def take_row_tiles(tiles: Mapping[tuple[object, ...], Tile]) -> None:
    """Take these tiles for products of each kind from now on."""
    _measured.update(tiles)


def group_of(layer: RowWeight) -> int:
    """Return the neighbours in a row that share a scale: 0 for no scale, 1 for one of a whole row in eight bits."""
    weight, scale = layer.weight, layer.scale
    if scale is None:
        return 0
    return 1 if scale.shape[1] == 1 and weight.dtype != torch.uint8 else _columns(weight) // scale.shape[1]


def _columns(weight: Tensor) -> int:
    """Return the elements of a row; a byte has two of four bits."""
    return weight.shape[1] * (2 if weight.dtype == torch.uint8 else 1)


def word_tiles(bits: int, *, gated: bool) -> list[Tile]:
    """Return the tiles to try for weights of so many bits that are read in words of eight bytes."""
    sizes = {
        4: ((16, 4), (8, 4), (8, 8), (16, 2), (32, 1)),
        8: ((16, 2), (16, 4), (16, 8), (8, 8), (4, 8)),
        16: ((4, 4), (4, 8), (8, 2), (8, 8), (8, 4), (4, 16)),
    }[bits]
    return [Tile(rows // 2 if gated else rows, 32 * warps, warps, words=True) for rows, warps in sizes]


def measured_row_tiles(
    calls: Sequence[RowCall],
    dtype: torch.dtype,
    time: Callable[[Sequence[Callable[[], object]]], list[float]] | None = None,
) -> dict[tuple[object, ...], Tile]:
    """Return the fastest tile of each kind of product that has none yet, for :func:`take_row_tiles`.

    The tile by its shape is one of those that are tried, and stays unless another is faster by 2 %. One whose results are not the
    same up to rounding is left out, and so is one that does not compile.

    Args:
        calls: products of a model, with weights on one GPU.
        dtype: of the row.
        time: returns the milliseconds that a GPU takes for what each of some functions launches; None: in CUDA graphs.
    """
    time = time or _graph_ms
    kinds: dict[tuple[object, ...], list[RowCall]] = {}
    for call in calls:
        if call.layer.weight.nbytes >= _LEAST_BYTES and call.kind(dtype) not in _measured:
            kinds.setdefault(call.kind(dtype), []).append(call)
    found = {}
    for kind, given in kinds.items():
        call = given[0]
        x = torch.linspace(-40, 60, call.columns, device=call.layer.weight.device).sin().to(dtype)
        tiles = [call.known_tile()]
        wanted, bits = _run([call], x, tiles[0]), call.word_bits(dtype)
        for tile in word_tiles(bits, gated=call.gate is not None) if bits else ():
            try:
                if _agree(_run([call], x, tile), wanted):
                    tiles.append(tile)
            except Exception as problem:  # of Triton's compiler
                reason = (str(problem) or type(problem).__name__).strip().split("\n")[0]
                warnings.warn(f"no products of one row by {tile}, which may be slower: {reason}", stacklevel=2)
        several = given[: -(-_MANY_BYTES // call.bytes)]
        times = time([partial(_run, several, x, tile) for tile in tiles])
        times[0] *= 0.98
        found[kind] = tiles[times.index(min(times))]
    return found


def _run(calls: Sequence[RowCall], x: Tensor, tile: Tile) -> Tensor:
    """Compute products, and return the last."""
    from meshfold.kernels.row_product_triton import product  # which needs Triton

    return [product(x, *each.layer, gate=each.gate, norm=each.norm, tile=tile) for each in calls][-1]


def _graph_ms(runs: Sequence[Callable[[], object]]) -> list[float]:
    """Return the milliseconds that a GPU takes for what functions launch, without the host: the least of a few rounds of all."""
    graphs, side = [torch.cuda.CUDAGraph() for _ in runs], torch.cuda.Stream()
    for run in runs:
        run()  # compiles
    torch.cuda.synchronize()
    with torch.cuda.stream(side):  # torch.cuda.graph collects garbage first, which takes longer than all else
        for graph, run in zip(graphs, runs, strict=True):
            graph.capture_begin(capture_error_mode="thread_local")  # other threads watch ranks
            try:
                run()
            finally:
                graph.capture_end()
    least = [float("inf")] * len(runs)
    for _ in range(_ROUNDS):  # one by one, the first would be timed by a clock that has yet to rise
        for i, graph in enumerate(graphs):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            least[i] = min(least[i], start.elapsed_time(stop))
    return least


def _agree(found: Tensor, wanted: Tensor) -> bool:
    """Return True if results differ by no more than the rounding of their dtype and other orders of sums."""
    error = (found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-300)
    return bool(error < (2e-2 if wanted.dtype.itemsize == 2 else 1e-4))
