"""Triangle multiplication and triangle attention (Algorithms 11 to 14 of AlphaFold 2), with OpenFold's parameter names.

Incoming edges and ending nodes are computed in the same way on the transposed pair tensor. The transpose moves nothing between
ranks: only the axes of rows and columns change places.
"""

from __future__ import annotations

from torch import Tensor, nn

from meshfold.folding import functions
from meshfold.folding.axial.attention import TRANSPOSED, UPRIGHT, attend_rows
from meshfold.folding.axial.axes import WHOLE, Axes
from meshfold.folding.axial.product import EdgeProduct, edge_product
from meshfold.folding.axial.sizes import Sizes, rows_cost
from meshfold.folding.primitives import Attention, LayerNorm, Linear
from meshfold.folding.shapes import flat, flat_mask
from meshfold.folding.state_names import accept_names
from meshfold.tensor_parallel import CostEntry


class TriangleMultiplication(nn.Module):
    """Triangle multiplicative update: outgoing ``z_ij += g_ij · W(norm(Σ_k a_ik b_jk))``, incoming with ``a_ki b_kj``.

    Attributes:
        axes: over which pair tensors are split.
    """

    def __init__(self, c_z: int, c_hidden: int, *, outgoing: bool, biased: bool = True) -> None:
        """Args:
        c_z: channels of pairs.
        c_hidden: channels of edges.
        outgoing: multiply outgoing edges, else incoming ones.
        biased: give the linear layers a bias (AlphaFold 2; AlphaFold 3 has none).
        """
        super().__init__()
        self.outgoing = outgoing
        gating = "gating" if biased else "final"
        self.linear_a_p = Linear(c_z, c_hidden, bias=biased)
        self.linear_a_g = Linear(c_z, c_hidden, bias=biased, init=gating)
        self.linear_b_p = Linear(c_z, c_hidden, bias=biased)
        self.linear_b_g = Linear(c_z, c_hidden, bias=biased, init=gating)
        self.linear_g = Linear(c_z, c_z, bias=biased, init=gating)
        self.linear_z = Linear(c_hidden, c_z, bias=biased, init="final")
        self.layer_norm_in = LayerNorm(c_z)
        self.layer_norm_out = LayerNorm(c_hidden)
        self.axes: Axes = WHOLE

    def traffic(self, sizes: Sizes) -> list[CostEntry]:
        """Return every collective of forward and backward."""
        axes = self.axes if self.outgoing else self.axes.turned
        width = axes.padded(sizes.residues) // axes.multiple
        return EdgeProduct(axes).cost(sizes.pair(axes, self.linear_a_p.out_features), width)

    def forward(self, z: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the update: ``* i j c``, this rank's block; ``mask``: ``* i j``, whole on every rank."""
        lead, axes = z.shape[:-3], self.axes
        z = self.layer_norm_in(flat(z, 3))
        pair_mask = own_pair_mask(axes, flat_mask(mask, lead, 2))
        a = functions.gate(self.linear_a_p(z), self.linear_a_g(z), pair_mask)
        b = functions.gate(self.linear_b_p(z), self.linear_b_g(z), pair_mask)
        if self.outgoing:
            x = edge_product(axes, a, b)
        else:
            x = edge_product(axes.turned, b.transpose(1, 2), a.transpose(1, 2)).transpose(1, 2)
        x = functions.gate(self.linear_z(self.layer_norm_out(x)), self.linear_g(z))
        return x.view(*lead, *x.shape[1:])


def own_pair_mask(axes: Axes, mask: Tensor | None) -> Tensor | None:
    """Return this rank's block of a whole pair mask, zero in padding: ``b i j -> b i j 1``."""
    return None if mask is None else axes.take(axes.take(mask, 1, axes.rows), 2, axes.columns).unsqueeze(-1)


class TriangleMultiplicationOutgoing(TriangleMultiplication):
    """Algorithm 11."""

    def __init__(self, c_z: int, c_hidden: int, *, biased: bool = True) -> None:
        """See :class:`TriangleMultiplication`."""
        super().__init__(c_z, c_hidden, outgoing=True, biased=biased)


class TriangleMultiplicationIncoming(TriangleMultiplication):
    """Algorithm 12."""

    def __init__(self, c_z: int, c_hidden: int, *, biased: bool = True) -> None:
        """See :class:`TriangleMultiplication`."""
        super().__init__(c_z, c_hidden, outgoing=False, biased=biased)


class TriangleAttention(nn.Module):
    """Attention within the rows of pairs (around the starting node) or their columns (around the ending node).

    Attributes:
        axes: over which pair tensors are split.
    """

    def __init__(
        self,
        c_in: int,
        c_hidden: int,
        no_heads: int,
        *,
        starting: bool = True,
        biased: bool = True,
        transposed_bias: bool = False,
    ) -> None:
        """Args:
        c_in: channels of pairs.
        c_hidden: channels of a head.
        no_heads: heads.
        starting: around the starting node (Algorithm 13), else the ending node (14).
        biased: give gate and output a bias (AlphaFold 2; AlphaFold 3 has none).
        transposed_bias: around the ending node, query i and key k have the bias of the pair (i, k), as in OpenFold 3 and the code
            of AlphaFold 3; else that of (k, i), as in both papers.
        """
        super().__init__()
        self.starting, self.transposed_bias = starting, transposed_bias
        self.layer_norm = LayerNorm(c_in)
        self.linear = Linear(c_in, no_heads, bias=False, init="normal")
        self.mha = Attention(c_in, c_hidden, no_heads, biased=biased)
        accept_names(self, {"linear_z.": "linear."})  # OpenFold 3
        self.axes: Axes = WHOLE

    def traffic(self, sizes: Sizes) -> list[CostEntry]:
        """Return every collective of forward and backward."""
        axes = self.axes if self.starting else self.axes.turned
        line, keys = (sizes.pair(axes, layer.in_features) for layer in (self.linear, self.mha.linear_o))
        return rows_cost(axes, line, keys, sizes.pair(axes, self.mha.no_heads), sizes.wide, self._bias_layout)

    @property
    def _bias_layout(self) -> str:
        return TRANSPOSED if self.transposed_bias and not self.starting else UPRIGHT

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the update: ``* i j c``, this rank's block; ``mask``: ``* i j``, whole on every rank."""
        lead, axes = x.shape[:-3], self.axes
        x, mask = flat(x, 3), flat_mask(mask, lead, 2)
        if not self.starting:
            x, mask, axes = x.transpose(1, 2), None if mask is None else mask.transpose(1, 2), axes.turned
        # The bias is made where the pairs lie: a head is much less to send than a channel.
        bias = self.linear(self.layer_norm(x))
        if self._bias_layout == TRANSPOSED:
            bias = bias.transpose(1, 2)
        y = attend_rows(axes, self.mha, self.layer_norm, x, mask, bias, self._bias_layout)
        y = y if self.starting else y.transpose(1, 2)
        return y.reshape(*lead, *y.shape[1:])
