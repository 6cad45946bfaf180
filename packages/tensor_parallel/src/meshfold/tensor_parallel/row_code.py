"""Code of a table's own class behind its lookup, such as ``super().forward(ids) * self.embed_scale`` of Gemma and BART.

It runs on this rank's part of the rows if it treats every element of them alike. That is tried on a small table.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class _GivenRows(nn.Embedding):
    """A table whose rows were looked up already."""

    _rows: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows."""
        return self._rows


_kinds: dict[type, type] = {}


class RowCode:
    """Code that a class of tables runs on the rows that nn.Embedding's forward looks up."""

    def __init__(self, module: nn.Embedding) -> None:
        """Args:
        module: the table; its plain attributes are kept.
        """
        self._kind = type(module)
        self._settings = {k: v for k, v in vars(module).items() if not k.startswith("_") and k != "training"}

    def __call__(self, rows: Tensor, ids: Tensor, weight: Tensor, buffers: dict[str, Tensor | None]) -> Tensor:
        """Return the table's output: ``.. h``, for rows of this shape.

        Args:
            rows: looked up.
            ids: the forward's argument.
            weight: of the table, for its dtype.
            buffers: of the table.
        """
        if self._kind not in _kinds:
            _kinds[self._kind] = type(self._kind.__name__, (self._kind, _GivenRows), {})
        # The class's code finds _GivenRows.forward where it calls super().forward.
        kind: Any = _kinds[self._kind]
        stand_in = kind.__new__(kind)
        nn.Module.__init__(stand_in)
        stand_in.__dict__.update(self._settings, _rows=rows, weight=weight, _buffers=buffers)
        found: Tensor = self._kind.forward(stand_in, ids)
        return found


def row_code(module: nn.Embedding) -> RowCode | None:
    """Return the code of a table's class behind its lookup; None if it has none, or none that can run on parts of the rows."""
    if type(module).forward is nn.Embedding.forward or not works_on_elements(module):
        return None
    return RowCode(module)


def works_on_elements(module: nn.Embedding) -> bool:
    """Return True if the forward of a table's class looks rows up once, and then treats all their elements alike."""
    if module._non_persistent_buffers_set != set(module._buffers) or set(module._parameters) != {"weight"}:
        return False
    random = torch.Generator().manual_seed(0)
    buffers = {
        name: torch.randn(value.shape, generator=random, dtype=torch.float64)
        for name, value in module._buffers.items()
        if value is not None and value.is_floating_point() and not value.dim()
    }
    if len(buffers) != len(module._buffers):
        return False
    weight = torch.randn(4, 6, generator=random, dtype=torch.float64)
    ids = torch.tensor([[0, 1, 3], [2, 2, 1]])
    code, rows = RowCode(module), F.embedding(ids, weight)
    given: dict[str, Tensor | None] = {**buffers}
    try:
        whole = torch.func.functional_call(module, {"weight": weight, **buffers}, (ids,))
        columns = torch.cat([code(part.contiguous(), ids, weight, given) for part in rows.split(2, -1)], -1)
        tokens = torch.cat([code(part, ids, weight, given) for part in rows.split(1, 1)], 1)
    except Exception:  # needs other arguments, or the whole table
        return False
    return isinstance(whole, Tensor) and torch.equal(whole, columns) and torch.equal(whole, tokens)
