"""Operations that mix elements along dims: reductions, softmax, norms, sorting, products.

They need whole dims: along a split dim they would see only a rank's piece.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from meshfold.mesh.tracking.broadcast import broadcast_dims
from meshfold.mesh.tracking.call import Call, Rule, as_list, at_dim, require_whole, require_whole_attention
from meshfold.mesh.tracking.dims import (
    Dim,
    Dims,
    axes_of,
    check_axes_once,
    distinct_splits,
    is_counted,
    is_open,
    is_split,
    is_whole,
    shape_of,
    size_of,
    whole,
)
from meshfold.mesh.tracking.reshaping import cut


def reduced(call: Call) -> list[Dims]:
    """Reduce over some dims, or over all."""
    dims = call.first
    numbers = call.numbers(_dims_given(call), len(dims))
    require_whole(dims, numbers, "reduces over")
    if call.given.get("keepdim", False):
        made = tuple(whole(1) if place in numbers else dim for place, dim in enumerate(dims))
    else:
        made = tuple(dim for place, dim in enumerate(dims) if place not in numbers)
    return [made for _ in as_list(call.out)]


def _dims_given(call: Call) -> Any:
    return call.given["dim"] if "dim" in call.given else call.given.get("dims")


def along(call: Call) -> list[Dims]:
    """Operate along one or several dims, which are kept."""
    dims = list(call.first)
    given = _dims_given(call)
    if call.name in ("sort", "argsort", "topk") and given is None:
        given = -1
    numbers = call.numbers(given, len(dims))
    require_whole(tuple(dims), numbers, "works along")
    for number in numbers:
        dims[number] = whole(as_list(call.out)[0].shape[number]) if dims else dims[number]
    return [tuple(dims) for _ in as_list(call.out)]


def _matrix(call: Call) -> list[Dims]:
    dims = call.first
    if not all(is_whole(dim) or is_counted(dim) for dim in dims[-2:]):
        require_whole(dims, (len(dims) - 2, len(dims) - 1), "tells places apart along")
    return [dims]


def _normed(call: Call) -> list[Dims]:
    """Return the dims of a norm over the last dims: the input's layout, and statistics with one number per row."""
    dims = call.first
    count = len(call.given["normalized_shape"])
    require_whole(dims, tuple(range(len(dims) - count, len(dims))), "normalises over")
    rows = (*dims[: len(dims) - count], *(whole(1) for _ in range(count)))
    return [dims if place == 0 else rows for place, _ in enumerate(as_list(call.out))]


def _glu(call: Call) -> list[Dims]:
    dims = list(call.first)
    number = call.number(call.given["dim"], len(dims))
    half = size_of(dims[number]) // 2
    if not is_whole(dims[number]):
        parts = [cut(dims[number], start, start + half) for start in (0, half)]
        dims[number] = parts[0]
    else:
        dims[number] = whole(half)
    return [tuple(dims)]


def _grouped(call: Call) -> list[Dims]:
    """Group norms and pooling, which keep batch and channels."""
    dims = call.first
    rank = len(dims)
    if "batch_norm" in call.name:
        require_whole(dims, tuple(range(rank)), "gathers statistics over")
    first = 1 if "norm" in call.name else rank - 1 if call.name.endswith("1d") else rank - 2
    require_whole(dims, tuple(range(first, rank)), "mixes neighbours along")
    found = []
    for out in as_list(call.out):
        sizes = tuple(out.shape)
        found.append(tuple(dims[i] if i < first and i < len(sizes) else whole(n) for i, n in enumerate(sizes)))
    return [
        made if shape_of(made) == tuple(out.shape) else () for made, out in zip(found, as_list(call.out), strict=True)
    ]


def _looked_up(call: Call) -> list[Dims]:
    """``searchsorted`` and the like: look up in a whole sorted tensor."""
    sorted_dims = call.dims_of(call.given["sorted_sequence" if call.name == "searchsorted" else "boundaries"])
    require_whole(sorted_dims, tuple(range(len(sorted_dims))), "looks up in")
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


def _multiplied(call: Call, a: Dims, b: Dims, batch: int) -> Dims:
    """Multiply ``.. i k`` by ``.. k j`` with ``batch`` batch dims."""
    summed = ((a, len(a) - 1), (b, batch))
    # Both have equally many elements, so if one is whole, an unknown other is whole too.
    lacking = is_split if any(is_whole(dims[number]) for dims, number in summed) else is_open
    for dims, number in summed:
        if is_split(dims[number]) or lacking(dims[number]):
            raise at_dim("sums products over", number, dims[number])
    rows: list[Dim] = list(a[batch:-1])
    columns: list[Dim] = list(b[batch + 1 :])
    ahead = _batch(a[:batch], b[:batch])
    return check_axes_once((*ahead, *rows, *columns))


def _batch(*several: Dims) -> Dims:
    """Return the batch dims of all operands."""
    made = []
    for place, dims in enumerate(zip(*several, strict=True)):
        split = distinct_splits(d for d in dims if is_split(d))
        if len(split) > 1 or (split and any(not is_split(d) and not _free(d) for d in dims)):
            raise at_dim("combines a shard with a tensor that is not split in the same way, along", place, split[0])
        made.append(split[0] if split else dims[0])
    return tuple(made)


def _free(dim: Dim) -> bool:
    return shape_of((dim,)) == (1,) or is_open(dim)


def _matmul(call: Call) -> list[Dims]:
    given = call.given
    names = {"mm": ("self", "mat2"), "bmm": ("self", "mat2"), "addmm": ("mat1", "mat2")}
    names |= {"baddbmm": ("batch1", "batch2"), "mv": ("self", "vec"), "addmv": ("mat", "vec")}
    names |= {"dot": ("self", "tensor"), "vdot": ("self", "other")}
    a, b = (call.dims(name) for name in names[call.name])
    made = _multiplied(call, a, b, 1 if call.name in ("bmm", "baddbmm") else 0)
    if call.name.startswith(("add", "badd")):
        shape = tuple(call.out.shape)
        product = call.out.new_empty(shape, device="meta")
        made = broadcast_dims(call, [(product, made), (given["self"], call.dims("self"))], shape)
    return [made]


def _attention(call: Call) -> list[Dims]:
    """Return the dims of attention on ``b heads s d``; those of log-sum-exp and other outputs follow from their shapes."""
    q, k, v = (call.dims(name) for name in ("query", "key", "value"))
    require_whole_attention(q, k, v)
    # Grouped-query attention: fewer heads of keys and values.
    k, v = (
        tuple(
            a if axes_of(a) == axes_of(b) and size_of(b) and size_of(a) % size_of(b) == 0 else b
            for a, b in zip(q, x, strict=True)
        )
        for x in (k, v)
    )
    lead = _batch(q[:-2], k[:-2], v[:-2])
    found: list[Dims] = []
    for place, out in enumerate(call.out):
        if not isinstance(out, Tensor):
            found.append(())
            continue
        dims = (*lead, *(whole(n) for n in out.shape[len(lead) :]))
        found.append(dims if (place == 0 or shape_of(dims) == tuple(out.shape)) else ())
    return found


def _embedding(call: Call) -> list[Dims]:
    table = call.dims("weight")
    require_whole(table, (0,), "looks rows up in a piece of")
    return [check_axes_once((*call.dims("indices"), *table[1:]))]


def _convolution(call: Call) -> list[Dims]:
    dims = call.dims("input")
    require_whole(dims, tuple(range(1, len(dims))), "mixes neighbours along")
    return [(dims[0], *(whole(n) for n in call.out.shape[1:]))]


_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math"
)


RULES: dict[str, Rule] = {
    **dict.fromkeys(_REDUCTIONS.split(), reduced),
    **dict.fromkeys(_ALONG.split(), along),
    **dict.fromkeys(_POOLS.split(), _grouped),
    **dict.fromkeys(("tril", "triu"), _matrix),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm", "rms_norm", "layer_norm"), _normed),
    "glu": _glu,
    **dict.fromkeys(("searchsorted", "bucketize"), _looked_up),
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "vdot"), _matmul),
    **dict.fromkeys(_ATTENTION.split(), _attention),
    "embedding": _embedding,
    **dict.fromkeys(("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution"), _convolution),
}
