"""Operations along dims: reductions, softmax, norms, sums so far, sorting. Along a split dim they would see a piece."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from meshfold.mesh.tracking.call import Call, keep_out
from meshfold.mesh.tracking.dims import Dims, cut, is_counted, is_whole, shape_of, size_of, whole

Rule = Callable[[Call], list[Dims]]


def _outs(call: Call) -> list[Tensor]:
    return list(call.out) if isinstance(call.out, list | tuple) else [call.out]


def reduced(call: Call) -> list[Dims]:
    """Over some dims, or over all."""
    dims = call.dims_of(call.tensors[0])
    given = call.given
    said = given["dim"] if "dim" in given else given.get("dims")
    numbers = call.numbers(said, len(dims))
    what = "reduces over"
    keep_out(dims, numbers, what)
    kept = bool(given.get("keepdim", False))
    made = tuple(whole(1) if place in numbers else dim for place, dim in enumerate(dims))
    if not kept:
        made = tuple(dim for place, dim in enumerate(dims) if place not in numbers)
    return [made for _ in _outs(call)]


def along(call: Call) -> list[Dims]:
    """Along one dim or several, which stay."""
    dims = list(call.dims_of(call.tensors[0]))
    given = call.given
    said = given["dim"] if "dim" in given else given.get("dims")
    if call.name in ("sort", "argsort", "topk") and said is None:
        said = -1
    numbers = call.numbers(said, len(dims))
    keep_out(tuple(dims), numbers, "works along")
    for number in numbers:
        dims[number] = whole(_outs(call)[0].shape[number]) if dims else dims[number]
    return [tuple(dims) for _ in _outs(call)]


def _matrix(call: Call) -> list[Dims]:
    dims = call.dims_of(call.tensors[0])
    if not all(is_whole(dim) or is_counted(dim) for dim in dims[-2:]):
        keep_out(dims, (len(dims) - 2, len(dims) - 1), "tells places apart along")
    return [dims]


def _normed(call: Call) -> list[Dims]:
    """A norm over the last dims: its result lies as the input, its statistics have one number a row."""
    dims = call.dims_of(call.tensors[0])
    count = len(call.given["normalized_shape"])
    keep_out(dims, tuple(range(len(dims) - count, len(dims))), "normalises over")
    rows = (*dims[: len(dims) - count], *(whole(1) for _ in range(count)))
    return [dims if place == 0 else rows for place, _ in enumerate(_outs(call))]


def _glu(call: Call) -> list[Dims]:
    dims = list(call.dims_of(call.tensors[0]))
    number = call.number(call.given["dim"], len(dims))
    half = size_of(dims[number]) // 2
    if not is_whole(dims[number]):
        parts = [cut(dims[number], start, start + half) for start in (0, half)]
        dims[number] = parts[0]
    else:
        dims[number] = whole(half)
    return [tuple(dims)]


def _grouped(call: Call) -> list[Dims]:
    """Norms with statistics of their own, and pooling, which leaves batch and channels alone."""
    dims = call.dims_of(call.tensors[0])
    rank = len(dims)
    if "batch_norm" in call.name:
        keep_out(dims, tuple(range(rank)), "gathers statistics over")
    first = 1 if "norm" in call.name else rank - 1 if call.name.endswith("1d") else rank - 2
    keep_out(dims, tuple(range(first, rank)), "mixes neighbours along")
    found = []
    for out in _outs(call):
        sizes = tuple(out.shape)
        found.append(
            tuple(dims[i] if i < first and i < len(sizes) else whole(n) for i, n in enumerate(sizes))
        )
    return [
        made if shape_of(made) == tuple(out.shape) else ()
        for made, out in zip(found, _outs(call), strict=True)
    ]


def _looked_up(call: Call) -> list[Dims]:
    """``searchsorted`` and its like look rows up in a whole sorted tensor."""
    sorted_dims = call.dims_of(call.given["sorted_sequence" if call.name == "searchsorted" else "boundaries"])
    keep_out(sorted_dims, tuple(range(len(sorted_dims))), "looks up in")
    return [call.dims_of(call.given["self"])]


_REDUCTIONS = (
    "sum mean amax amin max min argmax argmin prod any all logsumexp var std var_mean std_mean norm "
    "linalg_vector_norm median nanmedian count_nonzero nansum nanmean aminmax mode kthvalue "
    "equal _local_scalar_dense item is_nonzero histc bincount _unique2 unique_consecutive unique_dim"
)
_ALONG = (
    "_softmax _log_softmax _safe_softmax softmax log_softmax cumsum cumprod cummax cummin logcumsumexp flip roll sort "
    "argsort topk renorm _fft_c2c _fft_r2c _fft_c2r diff trapezoid"
)
_POOLS = (
    "max_pool2d_with_indices max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d "
    "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d upsample_nearest1d upsample_nearest2d "
    "upsample_bilinear2d upsample_linear1d native_group_norm native_batch_norm _native_batch_norm_legit cudnn_batch_norm "
    "_batch_norm_with_update reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d"
)

RULES: dict[str, Rule] = {
    **dict.fromkeys(_REDUCTIONS.split(), reduced),
    **dict.fromkeys(_ALONG.split(), along),
    **dict.fromkeys(_POOLS.split(), _grouped),
    **dict.fromkeys(("tril", "triu"), _matrix),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm", "rms_norm", "layer_norm"), _normed),
    "glu": _glu,
    **dict.fromkeys(("searchsorted", "bucketize"), _looked_up),
}
