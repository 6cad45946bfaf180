"""Attention on the heads and sequences a rank holds: local in every mode.

In attention, tokens are split by whole sequences and features by whole heads, so nothing is communicated. With fewer key/value
heads than ranks (GQA, arXiv 2305.13245) neighbouring ranks hold the same key/value head.

Torch's own ``nn.MultiheadAttention`` (Vaswani et al. 2017, arXiv 1706.03762) has parameters rather than layers as projections,
so the rules for linear layers do not reach them. The module itself is split, under the same names::

    in_proj_weight   3e e   this rank's heads of queries, keys and values
    out_proj.weight  e e    the columns that read these heads
    out_proj.bias    e      whole, added to the sum over the ranks

Its input is whole on every rank and enters (its gradient is summed over the ranks); its output is summed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.mesh import LayoutError, Mesh, Part, Placement
from meshfold.mesh.collectives import bind_collect, bind_enter, bind_leave
from meshfold.mesh.parameters import copy_parameter_hooks
from meshfold.tensor_parallel.layers.base import ShardedLayer, shard_parameter
from meshfold.tensor_parallel.layers.dropout import Dropout
from meshfold.tensor_parallel.modes import Mode


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    p: float = 0.0,
    dropout: Dropout | None = None,
) -> Tensor:
    """Compute scaled dot-product attention; dropped probabilities are the same under every layout.

    Args:
        q: ``b heads s d``, the local heads.
        k, v: ``b kv_heads t d``; each serves ``heads / kv_heads`` neighbouring query heads.
        mask: added to the scores, or bool (True attends), broadcast to ``b heads s t``.
        causal: a query sees the keys up to its own place, counted from the start as torch does.
        scale: of the scores; ``1/√d`` by default.
        p: probability to drop an attention weight. Above 0 the weights are computed in full.
        dropout: drops them; needed if p is above 0.

    Returns:
        ``b heads s d``.
    """
    groups = q.shape[1] // k.shape[1]
    if p == 0.0 or dropout is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=groups > 1
        )
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return dropout.drop_weights(attention_weights(q, k, mask=mask, causal=causal, scale=scale), p) @ v


def attention_weights(
    q: Tensor, k: Tensor, *, mask: Tensor | None = None, causal: bool = False, scale: float | None = None
) -> Tensor:
    """Return the weights of :func:`attention` in full, ``b heads s t``; as many heads of keys as of queries.

    A fully masked query, such as one of padding on the left, has weights of 0, as in torch.
    """
    scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    if mask is None:
        return torch.softmax(scores, -1, dtype=wide).to(q.dtype)
    # The softmax of a fully masked row is NaN, which would spread to every gradient.
    blind = (scores == float("-inf")).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(blind, 0.0), -1, dtype=wide)
    return weights.masked_fill(blind, 0.0).to(q.dtype)


def why_keep_forward(module: nn.MultiheadAttention) -> str:
    """Return why an attention keeps torch's own forward; empty if it can have that of :class:`SplitMultiheadAttention`."""
    if type(module) is not nn.MultiheadAttention:
        return f"{type(module).__name__} may have a forward of its own"
    if not module._qkv_same_embed_dim:
        return "its keys or values have a size of their own (kdim, vdim)"
    if module.bias_k is not None or module.add_zero_attn:
        return "it adds keys and values of its own (add_bias_kv, add_zero_attn)"
    out = module.out_proj
    own = all(
        isinstance(m._parameters.get(name), nn.Parameter) for m, name in ((module, "in_proj_weight"), (out, "weight"))
    )
    if type(out) is not nn.modules.linear.NonDynamicallyQuantizableLinear or not own:
        return "one of its weights is computed from others (parametrized, pruned, wrapped in another layer)"
    return ""


def why_keep_whole(module: nn.MultiheadAttention, mesh: Mesh, mode: Mode) -> str:
    """Return why an attention stays whole on every rank; empty if its heads can be split."""
    blocks = mesh.size(*mode.axes)
    heads = f"its {module.num_heads} heads do not divide by {blocks}" if module.num_heads % blocks else ""
    return why_keep_forward(module) or heads


class SplitOutProjection(ShardedLayer, nn.modules.linear.NonDynamicallyQuantizableLinear):
    """``out_proj``, which holds parameters and is not called."""


class SplitMultiheadAttention(ShardedLayer, nn.MultiheadAttention):
    """``nn.MultiheadAttention`` on the heads of one rank, with the same arguments, results and parameter names.

    ``num_heads`` and ``embed_dim`` remain the values for all ranks together.
    """

    _drop: Dropout

    @classmethod
    def split(
        cls,
        module: nn.MultiheadAttention,
        mesh: Mesh,
        axes: tuple[str, ...],
        dropout: Dropout,
        blocks: dict[nn.Parameter, nn.Parameter],
    ) -> None:
        """Make a module one of this class, in place, with this rank's blocks of its parameters, real or meta.

        Args:
            mesh, axes: whose ranks share the heads; without axes every rank has all heads, with the same dropout.
            dropout: of attention weights, as in a module that is whole on every rank.
            blocks: of parameters that are already split; this module's are added: shared parameters stay shared.
        """
        module.__class__, module.out_proj.__class__ = cls, SplitOutProjection
        assert isinstance(module, SplitMultiheadAttention)  # by the line above
        module._lie_on(mesh, axes, dropout)
        if axes:
            module._split(axes, blocks)

    def _lie_on(self, mesh: Mesh, axes: tuple[str, ...], dropout: Dropout) -> None:
        self.mesh = mesh
        self.out_proj.__dict__["mesh"] = mesh
        self._local = self.num_heads // mesh.size(*axes)
        self._first = mesh.index(*axes) * self._local
        self._enter, self._leave = bind_enter(mesh, axes), bind_leave(mesh, axes)
        self._collect_heads = bind_collect(mesh, 1, axes)
        dropout.between = ((), axes)  # all rows, this rank's heads
        object.__setattr__(self, "_drop", dropout)  # not as a submodule, which would show in the user's model

    def _split(self, axes: tuple[str, ...], blocks: dict[nn.Parameter, nn.Parameter]) -> None:
        width = self.embed_dim
        three: dict[int, tuple[Part, ...]] = {0: (Part(width),) * 3}
        places = [
            (self, "in_proj_weight", Placement(shape=(3 * width, width), axes=(axes, ()), parts=three)),
            (self, "in_proj_bias", Placement(shape=(3 * width,), axes=(axes,), parts=three)),
            (self.out_proj, "weight", Placement(shape=(width, width), axes=((), axes))),
        ]
        for module, name, place in places:
            whole = module._parameters[name]
            if whole is None:  # no bias
                continue
            if whole not in blocks:
                blocks[whole] = shard_parameter(whole, place, self.mesh)
                copy_parameter_hooks(whole, blocks[whole])
            module._parameters[name] = blocks[whole]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """See ``nn.MultiheadAttention``.

        Returns:
            The output, shaped as the query; and with ``need_weights`` the weights, ``b s t``, or ``b heads s t`` of all heads if
            they are not averaged.

        Raises:
            LayoutError: for ``is_causal`` without ``attn_mask``, which it describes.
        """
        if is_causal and attn_mask is None:
            raise LayoutError("MultiheadAttention(is_causal=True) is a hint about attn_mask: give attn_mask too")
        batched = query.dim() == 3
        query, key, value = (self._rows_first(x, batched) for x in self._entered(query, key, value))
        weight = self.in_proj_weight.chunk(3)
        bias = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (
            F.linear(x, w, b).unflatten(-1, (self._local, self.head_dim)).transpose(1, 2)
            for x, w, b in zip((query, key, value), weight, bias, strict=True)
        )
        p = self.dropout if self.training else 0.0
        weights = None
        if is_causal and key_padding_mask is None and not need_weights:
            out = attention(q, k, v, causal=True, p=p, dropout=self._drop)
        else:
            mask = self._mask(attn_mask, key_padding_mask, q, k)
            if need_weights:
                weights = attention_weights(q, k, mask=mask)
                weights = self._drop.drop_weights(weights, p) if p > 0.0 else weights
                out = weights @ v
            else:
                out = attention(q, k, v, mask=mask, p=p, dropout=self._drop)
        out = self._leave(F.linear(out.transpose(1, 2).flatten(2), self.out_proj.weight))
        if self.out_proj.bias is not None:
            out = out + self.out_proj.bias.to(out.dtype)
        if weights is not None:
            weights = (
                self._leave(weights.sum(1)) / self.num_heads if average_attn_weights else self._collect_heads(weights)
            )
            weights = weights if batched else weights.squeeze(0)
        out = out if self.batch_first or not batched else out.transpose(0, 1)
        return (out if batched else out.squeeze(0)), weights

    def _entered(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Enter each tensor once, so that its gradient is summed over the ranks once."""
        q = self._enter(query)
        k = q if key is query else self._enter(key)
        return q, k, k if value is key else q if value is query else self._enter(value)

    def _rows_first(self, x: Tensor, batched: bool) -> Tensor:
        """Return ``b s e``."""
        return x.unsqueeze(0) if not batched else x if self.batch_first else x.transpose(0, 1)

    def _mask(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        """Return the additive mask for the scores of this rank's heads; ``q``: ``b heads s d``, ``k``: ``b heads t d``.

        Raises:
            LayoutError: for a mask of other sizes.
        """
        found: Tensor | None = None
        if attn_mask is not None:
            found = _added(attn_mask, q.dtype)
            if found.dim() == 3:  # (b · heads) s t, with all heads
                found = found.unflatten(0, (q.shape[0], self.num_heads)).narrow(1, self._first, self._local)
        if key_padding_mask is not None:
            padding = _added(key_padding_mask, q.dtype).view(-1, 1, 1, key_padding_mask.shape[-1])
            found = padding if found is None else found + padding
        if found is not None and any(
            size not in (1, tokens) for size, tokens in zip(found.shape[-2:], (q.shape[2], k.shape[2]), strict=True)
        ):
            rows, columns = found.shape[-2:]
            raise LayoutError(
                f"MultiheadAttention is given a mask of {rows} × {columns} tokens, and attends with {q.shape[2]} queries to "
                f"{k.shape[2]} keys: this rank's part of the tokens is gathered for attention. Make the mask for whole sequences "
                "(of the size of the model's input, not of the shape of a hidden state), or use a spec in which tokens are not "
                "split over ranks (without sequence=dict(mode='megatron'))"
            )
        return found


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask of torch's attention (bool with True for masked, or numbers) as numbers to add."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, float("-inf"))
    return mask.to(dtype)
