"""Sizes as read in the source of a model's code, where Python gives no other sign.

``1.0 / x.shape[1]`` asks the size nothing, since the float is on the left; ``x.shape[1]`` and ``x.shape[-1]`` give the same number.

If tokens are split within sequences, a block gets ``m h`` instead of ``b s h``. Code that counts dims from the end, or names none,
means the same for both. ``x.mean(1)`` does not.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterable
from types import FrameType
from typing import Any

from torch import Tensor

_Span = tuple[int | None, int | None, int | None, int | None]
_NUMBERS = ("int", "float", "max", "min", "abs")


def meets_float(frame: FrameType, places: Iterable[int], rank: int) -> bool:
    """Return True if the code that reads a shape in a frame has a float to the left of one of these sizes.

    Args:
        frame: where ``x.shape`` or ``x.size()`` is read.
        places: the dims whose sizes are looked for.
        rank: how many dims there are.
    """
    spans, above = _parsed(frame.f_code.co_filename)
    positions = list(frame.f_code.co_positions())
    node = spans.get(positions[frame.f_lasti // 2])
    if node is None:
        return False
    sizes, names = _read(node, above, set(places), rank)
    for size in sizes:
        over = above.get(size)
        while isinstance(over, ast.BinOp | ast.UnaryOp):
            if isinstance(over, ast.BinOp) and over.right is size and _is_float(over.left):
                return True
            size, over = over, above.get(over)
        if isinstance(over, ast.Assign):
            names |= {target.id for target in over.targets if isinstance(target, ast.Name)}
    scope = node
    while not isinstance(scope, ast.FunctionDef | ast.Lambda | ast.Module):
        scope = above[scope]
    return bool(names) and any(
        isinstance(found, ast.BinOp) and _is_float(found.left) and _counts(found.right, names)
        for found in ast.walk(scope)
    )


def counts_from_front(frame: FrameType, rank: int) -> bool:
    """Return True if the code that reads a shape in a frame counts its dims from the front, or counts more than there are."""
    spans, above = _parsed(frame.f_code.co_filename)
    node = spans.get(list(frame.f_code.co_positions())[frame.f_lasti // 2])
    if node is None:
        return False
    over = above.get(node)
    if isinstance(node, ast.Call) and node.args:
        place = _integer(node.args[0])
    elif isinstance(over, ast.Subscript) and over.value is node:
        place = _integer(over.slice)
    else:
        is_taken_apart = isinstance(over, ast.Assign) and isinstance(over.targets[0], ast.Tuple)
        return is_taken_apart and len(over.targets[0].elts) > rank  # type: ignore[union-attr]
    return place is not None and place >= 0


def given_to(frame: FrameType) -> str:
    """Return the name of the child of ``self`` that the code in a frame calls with the element that it selects, as in
    ``self.embed_positions(x[..., -1])``; empty if there is none.
    """
    return _selections(frame.f_code.co_filename).get(list(frame.f_code.co_positions())[frame.f_lasti // 2], "")


@functools.lru_cache(maxsize=64)
def _selections(file: str) -> dict[_Span, str]:
    """Return the names of the children of ``self`` that a file's code calls with an element alone, by the element's position."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return {}
    found: dict[_Span, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="self"), attr=name), args=[ast.Subscript() as given], keywords=[]
            ):
                found[given.lineno, given.end_lineno, given.col_offset, given.end_col_offset] = name
    return found


def _read(node: ast.AST, above: dict[ast.AST, ast.AST], places: set[int], rank: int) -> tuple[list[ast.AST], set[str]]:
    """Return the expressions that are one of the sizes, and the variables that hold one."""
    over = above.get(node)
    if isinstance(node, ast.Call):
        assert isinstance(node.func, ast.Attribute)
        if node.args or node.keywords or node.func.attr != "size":
            return [node], set()
    if isinstance(over, ast.Subscript) and over.value is node:
        place = _integer(over.slice)
        return ([over] if place is not None and place % rank in places else []), set()
    if isinstance(over, ast.Assign) and isinstance(target := over.targets[0], ast.Tuple):
        return [], {one.id for place, one in enumerate(target.elts) if place in places and isinstance(one, ast.Name)}
    return [], set()


def _integer(node: ast.AST) -> int | None:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return value if isinstance(value, int) else None


def _is_float(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, float)
    if isinstance(node, ast.UnaryOp):
        return _is_float(node.operand)
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Div) or _is_float(node.left) or _is_float(node.right)
    if isinstance(node, ast.Call):
        called = node.func
        is_math = isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "math"
        return is_math or (isinstance(called, ast.Name) and called.id == "float")
    return False


def _counts(node: ast.AST, names: set[str]) -> bool:
    """Return True if an expression is a number computed from variables."""
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.BinOp):
        return _counts(node.left, names) or _counts(node.right, names)
    if isinstance(node, ast.UnaryOp):
        return _counts(node.operand, names)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _NUMBERS:
        return any(_counts(one, names) for one in node.args)
    return False


@functools.lru_cache(maxsize=64)
def _parsed(file: str) -> tuple[dict[_Span, ast.AST], dict[ast.AST, ast.AST]]:
    """Return a file's nodes that read a shape, by position, and the parent of each node."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return {}, {}
    above = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    spans: dict[_Span, ast.AST] = {}
    for node in ast.walk(tree):
        called = node.func if isinstance(node, ast.Call) else None
        is_size = isinstance(called, ast.Attribute) and called.attr in ("size", "numel", "nelement")
        if is_size or (isinstance(node, ast.Attribute) and node.attr == "shape"):
            assert isinstance(node, ast.expr)
            spans[(node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)] = node
    return spans, above


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
    **dict.fromkeys(("gather", "index_select", "index_add", "scatter", "scatter_add", "cat", "stack", "concat"), (1,)),
    **dict.fromkeys(
        ("chunk", "split", "roll", "topk", "norm", "normalize", "repeat_interleave", "diff", "kthvalue"), (2,)
    ),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims", "movedim"), (1, 2)),
    **dict.fromkeys(("flip", "permute"), (1, 2, 3)),
}
_NAMES = ("dim", "dims", "axis", "dim0", "dim1", "start_dim")


def dim_from_front(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
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
    """Return the indexed dim; ``x[..., :4]`` counts from the end, ``x[:, :4]`` from the front."""
    items = index if isinstance(index, tuple) else (index,)
    for place, item in enumerate(items):
        if item is Ellipsis:
            return ""
        if item != slice(None) if isinstance(item, slice) else not isinstance(item, Tensor) or item.dim() < 2:
            return str(place)
    return ""
