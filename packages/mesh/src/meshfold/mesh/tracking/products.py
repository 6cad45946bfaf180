"""Products: what is summed over must be whole on every rank."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from meshfold.mesh.tracking.broadcast import together
from meshfold.mesh.tracking.call import Call, at_dim, keep_out
from meshfold.mesh.tracking.dims import (
    Dim,
    Dims,
    axes_of,
    common,
    is_open,
    is_split,
    is_whole,
    once,
    shape_of,
    size_of,
    whole,
)

Rule = Callable[[Call], list[Dims]]


def _multiplied(call: Call, a: Dims, b: Dims, batch: int) -> Dims:
    """``.. i k`` times ``.. k j``, with so many dims of a batch."""
    summed = ((a, len(a) - 1), (b, batch))
    # Of one that is whole as many elements as of the other: what is not known of that is whole too.
    lacking = is_split if any(is_whole(dims[number]) for dims, number in summed) else is_open
    for dims, number in summed:
        if is_split(dims[number]) or lacking(dims[number]):
            raise at_dim("sums products over", number, dims[number])
    rows: list[Dim] = list(a[batch:-1])
    columns: list[Dim] = list(b[batch + 1 :])
    ahead = _batch(call, a[:batch], b[:batch])
    return once((*ahead, *rows, *columns))


def _batch(call: Call, *several: Dims) -> Dims:
    """Dims that all operands have, one by one."""
    made = []
    for place, dims in enumerate(zip(*several, strict=True)):
        split = common(d for d in dims if is_split(d))
        if len(split) > 1 or (split and any(not is_split(d) and not _free(d) for d in dims)):
            raise at_dim("brings a piece together with what is no such piece, along", place, split[0])
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
        made = together(call, [(product, made), (given["self"], call.dims("self"))], shape)
    return [made]


def _attention(call: Call) -> list[Dims]:
    """``b heads s d``; the log-sum-exp and what else comes out lie as far as their shapes tell."""
    q, k, v = (call.dims(name) for name in ("query", "key", "value"))
    for what, dims in (("queries", q), ("keys", k), ("values", v)):
        for number in (len(dims) - 2, len(dims) - 1):
            if not is_whole(dims[number]):
                raise at_dim(f"attends with pieces of {what}:", number, dims[number])
    # Fewer heads of keys and values serve several of queries each.
    k, v = (
        tuple(
            a if axes_of(a) == axes_of(b) and size_of(b) and size_of(a) % size_of(b) == 0 else b
            for a, b in zip(q, x, strict=True)
        )
        for x in (k, v)
    )
    lead = _batch(call, q[:-2], k[:-2], v[:-2])
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
    keep_out(table, (0,), "looks rows up in a piece of")
    return [once((*call.dims("indices"), *table[1:]))]


def _convolution(call: Call) -> list[Dims]:
    dims = call.dims("input")
    keep_out(dims, tuple(range(1, len(dims))), "mixes neighbours along")
    return [(dims[0], *(whole(n) for n in call.out.shape[1:]))]


_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math"
)

RULES: dict[str, Rule] = {
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "vdot"), _matmul),
    **dict.fromkeys(_ATTENTION.split(), _attention),
    "embedding": _embedding,
    **dict.fromkeys(("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution"), _convolution),
}
