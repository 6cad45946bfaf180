"""One call of a model's attention, carried out over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from meshfold.mesh.errors import LayoutError
from meshfold.mesh.mesh import Mesh
from meshfold.sequence.attend import attention


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What :func:`meshfold.sequence.sequence_parallel` was told; its arguments say what each means."""

    mesh: Mesh
    mode: str | Callable[..., object] = "ring"
    causal: bool | None = None
    window: int | None = None
    documents: Sequence[int] | None = None
    length: int | None = None
    order: str | None = None
    kernel: str = "auto"

    def with_batch(self, length: int | None, documents: Sequence[int] | None) -> Settings:
        """The same for a batch of another length or other documents."""
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
        """Attention in the layout of models, heads before tokens: ``b heads s d`` -> ``b s heads d``.

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
        given: dict[str, Any] = dict(
            causal=causal if self.causal is None else self.causal,
            window=window if self.window is None else self.window,
            documents=self.documents,
            length=self.length,
            scale=scale,
            dropout=dropout,
        )
        turned = (x.transpose(1, 2) for x in (q, k, v))
        return attention(
            *turned, mesh=self.mesh, mode=self.mode, order=self.order, kernel=self.kernel, **given
        )
