"""Attention calls of a model, run over the ranks, and the function mode that intercepts them.

The mode also handles models that count positions themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from meshfold.kernels.fuse import is_compiled
from meshfold.mesh import LayoutError, Mesh
from meshfold.sequence.attention import attention
from meshfold.sequence.dropout import DrawDropout, WeightDropout
from meshfold.sequence.layout_tracking import track_attention

Documents = Sequence[int] | Sequence[Sequence[int]]
"""cumulative lengths of packed documents, the same for all rows or for each row"""


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
            causal, window, scale, dropout: the model's own.

        Raises:
            LayoutError: for a mask of unknown meaning, and for what attention itself refuses.
        """
        if self.causal is None and masked:
            raise LayoutError(
                "the model passes attention a mask that it made for one rank's tokens: describe the mask by "
                "sequence_parallel(..., causal=True) or causal=False, with window= or documents= where it has them; "
                "pad at the end and give the length instead of masking padding"
            )
        rows = documents_by_row(self.documents)
        if len(rows) > 1 and len(rows) != q.shape[0]:
            raise LayoutError(
                f"{len(rows)} rows have different documents, but attention gets {q.shape[0]} rows here: pack all rows alike "
                "if other axes split or pad the batch"
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


# Their attention happens inside torch and cannot be replaced.
_SEALED = (
    F.multi_head_attention_forward,
    torch._native_multi_head_attention,
    torch._transformer_encoder_layer_fwd,
)
_INTEGERS = (None, torch.int64, torch.int32)


class AttentionMode(TorchFunctionMode):
    """Function mode in which ``scaled_dot_product_attention`` runs over the ranks.

    If a model counts positions itself, ``torch.arange(n)`` for the n tokens of this rank gives their positions in the whole
    sequence. ``positions`` maps each such n to its positions.
    """

    def __init__(
        self,
        settings: Callable[[], AttentionSettings],
        positions: Callable[[int], Tensor | None],
        told: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__()
        self._settings, self._positions, self._told = settings, positions, told

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func in _SEALED:
            raise LayoutError(
                "torch.nn.MultiheadAttention cannot attend over a split sequence: write the attention with "
                "torch.nn.functional.scaled_dot_product_attention"
            )
        if func is torch.arange and (found := self._count(*args, **kwargs)) is not None:
            return found
        return func(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if query.dim() != 4:
            raise LayoutError(
                f"attention over a split sequence needs queries [b, heads, s, d], but the model's are {list(query.shape)}: give "
                "scaled_dot_product_attention four dims; for one head pass query.unsqueeze(1), key.unsqueeze(1) and "
                "value.unsqueeze(1), and use .squeeze(1) on the result"
            )
        if not enable_gqa and query.shape[1] != key.shape[1]:
            raise LayoutError(
                f"the model has {query.shape[1]} heads of queries but {key.shape[1]} of keys: call "
                "scaled_dot_product_attention(..., enable_gqa=True), or repeat the keys and values for each head of queries"
            )
        out = self._settings().attend(
            query,
            key,
            value,
            masked=attn_mask is not None,
            causal=is_causal,
            window=None,
            scale=scale,
            dropout=dropout_p,
        )
        return out.transpose(1, 2)

    def _count(self, *bounds: Any, **options: Any) -> Tensor | None:
        """Return the positions for an arange of tokens; None for any other arange."""
        end = options.get("end", bounds[-1] if 1 <= len(bounds) <= 2 else None)
        start = options.get("start", bounds[0] if len(bounds) == 2 else 0)
        dtype = options.get("dtype")
        if start != 0 or not isinstance(end, int) or options.get("step", 1) != 1:
            return None
        if len(bounds) > 2 or (dtype not in _INTEGERS and not dtype.is_floating_point):
            return None
        positions = self._positions(end)
        if positions is None:
            return None
        where = options.get("device") or torch.get_default_device()
        return self._told(positions.to(where, dtype or torch.int64, non_blocking=True))


class ModeAroundModules:
    """Wraps the forward of modules in a mode, so a recomputed forward runs in it too."""

    def __init__(self, model: nn.Module, make: Callable[[], TorchFunctionMode]) -> None:
        self._make = make
        self._local = threading.local()
        self._handles = []
        for module in _outside_of_graphs(model):
            if module is model or any(True for _ in module.children()) or not _of_torch(module):
                self._handles.append(module.register_forward_pre_hook(self._enter))
                self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def _enter(self, module: nn.Module, args: Any) -> None:
        entered: list[tuple[nn.Module, TorchFunctionMode | None]]
        entered = self._local.__dict__.setdefault("entered", [])
        mode = None if entered else self._make()  # one mode per call, entered at the outermost module
        if mode is not None:
            mode.__enter__()
        entered.append((module, mode))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        entered = self._local.__dict__.get("entered", [])
        if not entered or entered[-1][0] is not module:
            return  # the forward failed in a hook that ran before ours
        _, mode = entered.pop()
        if mode is not None:
            mode.__exit__(None, None, None)

    def remove(self) -> None:
        """Restore the modules."""
        for handle in self._handles:
            handle.remove()


def _outside_of_graphs(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules outside compiled blocks: inside, a hook's number would become a guard of the graph."""
    seen: set[nn.Module] = set()
    waiting = [module]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            yield module
            waiting += reversed([] if is_compiled(module) else [*module.children()])


def _of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")
