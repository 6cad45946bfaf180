"""Linear layers with AlphaFold's initialisation, LayerNorm and gated attention: what all blocks are made of."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshfold.folding import functions

_TRUNCATED_STD = 0.87962566103423978  # of a standard normal number between -2 and 2


class Linear(nn.Linear):
    """``nn.Linear`` with an initialisation of AlphaFold 2 (supplement, 1.11.4), by name.

    ``default`` is LeCun's and ``relu`` He's truncated normal, ``glorot`` uniform, ``normal`` has the variance 1/c_in; ``gating``
    starts at weight 0 and bias 1, ``final`` at 0.
    """

    def __init__(self, c_in: int, c_out: int, bias: bool = True, init: str = "default") -> None:
        """Args:
        c_in, c_out: input and output channels.
        bias: add a bias.
        init: name of the initialisation.

        Raises:
            ValueError: for an unknown name.
        """
        if init not in ("default", "relu", "glorot", "normal", "gating", "final"):
            raise ValueError(f"init={init!r}: use default, relu, glorot, normal, gating or final")
        self.init = init
        super().__init__(c_in, c_out, bias=bias)

    def reset_parameters(self) -> None:
        """Fill weight and bias."""
        if self.bias is not None:
            nn.init.constant_(self.bias, 1.0 if self.init == "gating" else 0.0)
        if self.init in ("gating", "final"):
            nn.init.zeros_(self.weight)
        elif self.init == "glorot":
            nn.init.xavier_uniform_(self.weight)
        elif self.init == "normal":
            nn.init.normal_(self.weight, std=1 / math.sqrt(self.in_features))
        else:
            std = math.sqrt((2.0 if self.init == "relu" else 1.0) / self.in_features) / _TRUNCATED_STD
            nn.init.trunc_normal_(self.weight, std=std, a=-2 * std, b=2 * std)


def apply_together(x: Tensor, layers: Sequence[nn.Module]) -> Sequence[Tensor]:
    """Apply linear layers to one input by one matmul: ``.. c_in -> .. c_out`` for each, parts of one tensor.

    Backward has one matmul for the gradient of ``x`` too, where it had one a layer and summed them. Layers of another class, or
    with hooks, are called one by one.
    """
    plain = [
        layer for layer in layers if type(layer) is Linear and not (layer._forward_hooks or layer._forward_pre_hooks)
    ]
    if len(plain) < len(layers):
        return [layer(x) for layer in layers]
    weight = torch.cat([layer.weight for layer in plain])
    bias = None
    if any(layer.bias is not None for layer in plain):
        none = weight.new_zeros(max(layer.out_features for layer in plain))
        bias = torch.cat([none[: layer.out_features] if layer.bias is None else layer.bias for layer in plain])
    together = functional.linear(x, weight, bias)
    made: Sequence[Tensor] = together.split([layer.out_features for layer in plain], -1)
    return made


class LayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` over the channels, computed by :func:`meshfold.folding.functions.layer_norm`."""

    def __init__(self, c: int, eps: float = 1e-5) -> None:
        """``c``: channels."""
        super().__init__(c, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """``.. c -> .. c``."""
        return functions.layer_norm(x, self.weight, self.bias, self.eps)


class Attention(nn.Module):
    """The projections of gated multi-head attention, with OpenFold's names; :func:`.functions.attend` stands between them.

    Parameters: ``linear_q``, ``linear_k``, ``linear_v``, ``linear_g``, ``linear_o``.
    """

    def __init__(self, c: int, c_hidden: int, no_heads: int, *, biased: bool = True, q_bias: bool = False) -> None:
        """Args:
        c: channels of the input and of the output.
        c_hidden: channels of a head.
        no_heads: heads.
        biased: give ``linear_g`` and ``linear_o`` a bias (AlphaFold 2; AlphaFold 3 has none).
        q_bias: give ``linear_q`` one (Algorithm 24 of AlphaFold 3).
        """
        super().__init__()
        self.c_hidden, self.no_heads = c_hidden, no_heads
        width = c_hidden * no_heads
        self.linear_q = Linear(c, width, bias=q_bias, init="glorot")
        self.linear_k = Linear(c, width, bias=False, init="glorot")
        self.linear_v = Linear(c, width, bias=False, init="glorot")
        self.linear_o = Linear(width, c, bias=biased, init="final")
        self.linear_g = Linear(c, width, bias=biased, init="gating" if biased else "final")

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return queries, keys and values, ``.. n c -> .. n h d``, and logits of the gate, ``.. n (h d)``.

        The logits are None without gradients: :meth:`output` computes them then, so that they are not held meanwhile.
        """
        layers = [self.linear_q, self.linear_k, self.linear_v]
        if torch.is_grad_enabled():  # they are kept for backward in any case
            layers.append(self.linear_g)
        made = apply_together(x, layers)
        q, k, v = (y.unflatten(-1, (self.no_heads, self.c_hidden)) for y in made[:3])
        return q, k, v, made[3] if len(made) > 3 else None

    def output(self, out: Tensor, x: Tensor, logits: Tensor | None) -> Tensor:
        """Gate and project what was attended to: ``.. n h d -> .. n c``; ``x`` is the queries' input, ``logits`` its gate's."""
        logits = self.linear_g(x) if logits is None else logits
        y: Tensor = self.linear_o(functions.gate(out.flatten(-2), logits))
        return y


class GlobalAttention(nn.Module):
    """The projections of global column attention (Algorithm 19): one query a column, one key and value head for all heads."""

    def __init__(self, c_in: int, c_hidden: int, no_heads: int) -> None:
        """Args:
        c_in: channels of the MSA.
        c_hidden: channels of a head.
        no_heads: heads.
        """
        super().__init__()
        self.c_hidden, self.no_heads = c_hidden, no_heads
        self.linear_q = Linear(c_in, c_hidden * no_heads, bias=False, init="glorot")
        self.linear_k = Linear(c_in, c_hidden, bias=False, init="glorot")
        self.linear_v = Linear(c_in, c_hidden, bias=False, init="glorot")
        self.linear_g = Linear(c_in, c_hidden * no_heads, init="gating")
        self.linear_o = Linear(c_hidden * no_heads, c_in, init="final")
