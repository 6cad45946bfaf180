"""A module's forward, read before it runs: its signature, and its source if there is one.

Nothing else in the conversion reads a user's source. The source gives the order of a module's children. It also shows attention
that reads the number of all heads; if this cannot be tried, the model is refused.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Mapping

from torch import nn

_SIZES = (
    "num_attention_heads",
    "num_key_value_heads",
    "num_heads",
    "n_head",
    "n_heads",
    "hidden_size",
    "n_embd",
    "d_model",
)
"""Names in configurations for the sizes of all heads together."""


def parameters_of(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a module's forward by name, without ``self``."""
    return dict(list(inspect.signature(type(module).forward).parameters.items())[1:])


def children_called(module: nn.Module) -> tuple[str, ...]:
    """Return the names of children in the order of their first call in a module's forward; empty without a source."""
    return _read(type(module).forward)[0]


def config_size(module: nn.Module) -> str:
    """Return the first size of all heads that a forward reads, as ``config.num_heads``; empty if it reads none."""
    return next(iter(_read(type(module).forward)[1]), "")


@functools.lru_cache(maxsize=256)  # a model's layers share a few forwards
def _read(forward: Callable[..., object]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):  # a class defined at a prompt has no source
        return (), ()
    found = _Visitor()
    found.visit(tree)
    return tuple(dict.fromkeys(found.calls)), tuple(found.sizes)


class _Visitor(ast.NodeVisitor):
    """AST visitor that lists calls of ``self``'s attributes, arguments first, and sizes read from a ``config``."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.sizes: list[str] = []

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        match node.func:
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                self.calls.append(name)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        match node.value:
            case ast.Name(id="config") | ast.Attribute(attr="config") if node.attr in _SIZES:
                self.sizes.append(f"config.{node.attr}")
