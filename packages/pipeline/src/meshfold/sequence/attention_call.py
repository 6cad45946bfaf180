"""One call of a model's attention, carried out over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meshfold.mesh import LayoutError, Mesh
from meshfold.sequence.attention import attention
from meshfold.sequence.dropout import DrawDropout, WeightDropout
from meshfold.sequence.layout_tracking import track_attention

Documents = Sequence[int] | Sequence[Sequence[int]]
"""cumulative lengths of packed documents, of all rows alike or of each row"""


def documents_by_row(documents: Documents | None) -> list[tuple[int, ...]]:
    """Return the documents of every row; one entry if all rows have the same, none without documents."""
    if documents is None:
        return []
    nested = len(documents) > 0 and isinstance(documents[0], tuple | list)
    return [tuple(row) for row in (documents if nested else [documents])]  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class AttentionSettings:
    """Arguments of :func:`meshfold.sequence.sequence_parallel`, which documents them."""

    mesh: Mesh
    mode: str | Callable[..., object] = "ring"
    causal: bool | None = None
    window: int | None = None
    documents: Documents | None = None
    length: int | None = None
    order: str | None = None
    kernel: str = "auto"
    draw: DrawDropout | None = None

    def with_batch(self, length: int | None, documents: Documents | None) -> AttentionSettings:
        """Return the settings for a batch of another length or other documents."""
        return replace(self, length=length, documents=documents)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        masked: bool,
        causal: bool,
        window: int | None,
        scale: float | None,
        dropout: float,
    ) -> Tensor:
        """Attend in the layout of models, heads before tokens: ``b heads s d`` -> ``b s heads d``.

        Args:
            q, k, v: this rank's tokens.
            masked: the model passes a mask of its own.
            causal, window, scale, dropout: what the model asks for.

        Raises:
            LayoutError: for a mask that nobody has said the meaning of, and for what attention itself refuses.
        """
        if self.causal is None and masked:
            raise LayoutError(
                "the model gives its attention a mask, which it made for the tokens of one rank: say what it stands for by "
                "sequence_parallel(..., causal=True) or causal=False, with window= or documents= where it has them; "
                "pad at the end and give the length instead of masking padding"
            )
        rows = documents_by_row(self.documents)
        if len(rows) > 1 and len(rows) != q.shape[0]:
            raise LayoutError(
                f"{len(rows)} rows with documents of their own, and attention sees {q.shape[0]} of them here: pack all rows alike "
                "where other axes split or fill up the batch"
            )
        given: dict[str, Any] = dict(
            causal=causal if self.causal is None else self.causal,
            window=window if self.window is None else self.window,
            length=self.length,
            scale=scale,
        )
        drop: float | WeightDropout = dropout
        if dropout and self.draw is not None and not callable(self.mode):
            drop = self.draw(q, dropout)
        given |= dict(mesh=self.mesh, mode=self.mode, order=self.order, kernel=self.kernel)
        return track_attention(q, k, v, lambda: self._over_ranks(q, k, v, rows, drop, given))

    def _over_ranks(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: list[tuple[int, ...]],
        drop: float | WeightDropout,
        given: dict[str, Any],
    ) -> Tensor:
        turned = [x.transpose(1, 2) for x in (q, k, v)]
        if len(rows) < 2:
            return attention(*turned, documents=rows[0] if rows else None, dropout=drop, **given)
        parts = []
        for row, mine in enumerate(zip(*(x.split(1) for x in turned), strict=True)):
            its = drop.of_rows(row) if isinstance(drop, WeightDropout) else drop
            parts.append(attention(*mine, documents=rows[row], dropout=its, **given))
        return torch.cat(parts)
