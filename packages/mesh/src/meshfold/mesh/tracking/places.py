"""Dims that a model's code counts from the front, where its stream has fewer than the code believes.

Where tokens are split within sequences a block is given ``m h`` in place of ``b s h``: what counts dims from the end, or names
none, means the same of both. ``x.mean(1)`` does not.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

_SECOND = [
    "mean",
    "sum",
    "prod",
    "amax",
    "amin",
    "max",
    "min",
    "argmax",
    "argmin",
    "any",
    "all",
    "logsumexp",
    "var",
    "std",
    "softmax",
    "log_softmax",
    "cumsum",
    "cumprod",
    "sort",
]
_DIMS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(_SECOND, (1,)),
    **dict.fromkeys(
        ("argsort", "unbind", "squeeze", "unsqueeze", "flatten", "unflatten", "glu", "select", "narrow"), (1,)
    ),
    **dict.fromkeys(
        ("gather", "index_select", "index_add", "scatter", "scatter_add", "cat", "stack", "concat"), (1,)
    ),
    **dict.fromkeys(
        ("chunk", "split", "roll", "topk", "norm", "normalize", "repeat_interleave", "diff", "kthvalue"), (2,)
    ),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims", "movedim"), (1, 2)),
    **dict.fromkeys(("flip", "permute"), (1, 2, 3)),
}
_NAMES = ("dim", "dims", "axis", "dim0", "dim1", "start_dim")


def from_the_front(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return which dim a call counts from the front; empty if none."""
    if name == "getitem":
        return _indexed(args[1])
    if name not in _DIMS:
        return ""
    said = [args[place] for place in _DIMS[name] if place < len(args)]
    said += [kwargs[key] for key in _NAMES if key in kwargs]
    for value in said:
        for number in value if isinstance(value, list | tuple) else (value,):
            if isinstance(number, int) and not isinstance(number, bool) and number >= 0:
                return str(number)
    return ""


def _indexed(index: Any) -> str:
    """``x[..., :4]`` counts from the end, ``x[:, :4]`` from the front."""
    items = index if isinstance(index, tuple) else (index,)
    for place, item in enumerate(items):
        if item is Ellipsis:
            return ""
        if item != slice(None) if isinstance(item, slice) else not isinstance(item, Tensor) or item.dim() < 2:
            return str(place)
    return ""
