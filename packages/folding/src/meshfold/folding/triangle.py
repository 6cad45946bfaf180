"""Triangle multiplication and triangle attention (Algorithms 11 to 14 of AlphaFold 2), with OpenFold's parameter names.

Incoming edges and ending nodes are computed in the same way on the transposed pair tensor. The transpose moves nothing between
ranks: only the axes of rows and columns change places.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshfold.folding import functions
from meshfold.folding.axial.attention import TRANSPOSED, UPRIGHT, attend_rows, pair_bias
from meshfold.folding.axial.axes import WHOLE, Axes
from meshfold.folding.axial.product import EdgeProduct, edge_product
from meshfold.folding.axial.sizes import Sizes, rows_cost
from meshfold.folding.memory import Parts, run_parts
from meshfold.folding.primitives import Attention, LayerNorm, Linear, apply_together
from meshfold.folding.shapes import flat, flat_mask, flat_target
from meshfold.folding.state_names import accept_names
from meshfold.tensor_parallel import CostEntry

STEPS = 8
"""Steps of a product over ranks within a part in channels, without gradients: what they gather is a few lines of each rank's."""
CHANNELS = 8
"""Parts of a product have a multiple of so many channels: GPUs multiply matrices whose rows are aligned to 16 bytes."""


class EdgeMultiplication(nn.Module):
    """Triangle multiplicative update: outgoing ``z_ij += g_ij · W(norm(Σ_k a_ik b_jk))``, incoming with ``a_ki b_kj``.

    Subclasses have the layers.

    Attributes:
        outgoing: multiply outgoing edges, else incoming ones.
        axes: over which pair tensors are split.
    """

    outgoing: bool
    axes: Axes

    @property
    @abstractmethod
    def edge_channels(self) -> int:
        """Channels of an edge."""

    @abstractmethod
    def normalise(self, z: Tensor) -> Tensor:
        """Return normalised pairs."""

    @abstractmethod
    def operands(self, z: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return both operands from normalised pairs, and logits of the output's gate, or None: then they are computed later."""

    @abstractmethod
    def operand_weights(self, channels: slice) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias that make some channels of both operands, then of their gates."""

    @abstractmethod
    def emit(self, x: Tensor) -> Tensor:
        """Return pairs from products of edges, not yet gated."""

    @abstractmethod
    def gate_logits(self, z: Tensor) -> Tensor:
        """Return logits of the output's gate from normalised pairs."""

    def traffic(self, sizes: Sizes) -> list[CostEntry]:
        """Return every collective of forward and backward."""
        axes = self.axes if self.outgoing else self.axes.turned
        width = axes.padded(sizes.residues) // axes.multiple
        return EdgeProduct(axes).cost(sizes.pair(axes, self.edge_channels), width)

    def forward(self, z: Tensor, mask: Tensor | None = None, into: Tensor | None = None) -> Tensor:
        """Return the update, in parts if the memory settings say so.

        On one rank without gradients parts are rows. Else they are some channels of edges, and then some rows.

        Args:
            z: ``* i j c``, this rank's block.
            mask: ``* i j``, whole on every rank.
            into: what the update is added to, in place; without gradients only. It may be ``z``.

        Returns:
            The update, ``* i j c``, or ``into``.
        """
        lead, axes = z.shape[:-3], self.axes
        z = flat(z, 3)
        pair_mask = own_pair_mask(axes, flat_mask(mask, lead, 2))
        parts = self.channel_parts(z)
        if parts.is_whole:
            z = self.normalise(z)
            a, b, logits = self.operands(z, pair_mask)
            x = self._multiply(a, b, axes)
            del a, b
            x = self.emit(x)
            x = functions.gate(x, self.gate_logits(z) if logits is None else logits)
            x = x.view(*lead, *x.shape[1:])
            return x if into is None else into.add_(x)

        if not (self.axes.is_split or torch.is_grad_enabled()):
            y = self._by_rows(z, pair_mask, flat_target(into, 3))
            return y.view(*lead, *y.shape[1:]) if into is None else into

        axes = self.axes if torch.is_grad_enabled() else replace(self.axes, product_steps=STEPS)

        def some_channels(first: int, size: int) -> Tensor:
            a, b = self._operands_by_rows(z, pair_mask, slice(first, first + size))
            return self._multiply(a, b, axes)

        x = run_parts(parts, some_channels, 3)

        def some_rows(first: int, size: int) -> Tensor:
            before, after = (t.narrow(1, first, size) for t in (z, x))
            logits = self.gate_logits(self.normalise(before))
            return functions.gate(self.emit(after), logits)

        target = flat_target(into, 3)
        y = run_parts(self._row_parts(z, 3 * z.shape[-1] + 2 * x.shape[-1]), some_rows, 1, target)
        return y.view(*lead, *y.shape[1:]) if into is None else into

    def _by_rows(self, z: Tensor, mask: Tensor | None, into: Tensor | None) -> Tensor:
        """Return the update, some rows at a time: rows of one operand meet all of the other one, which is made first.

        Parts in channels need as much memory, for the product, and read all pairs for every few channels. Of incoming edges the
        same is done with columns, on transposed pairs; so the pairs that are left to read are not those that have been updated.
        """
        if not self.outgoing:
            z = z.transpose(1, 2)
            mask, into = (None if t is None else t.transpose(1, 2) for t in (mask, into))
        first, second = self._weights_of_operands()
        rows_of, other_of = (first, second) if self.outgoing else (second, first)

        def edges(rows: Tensor, some: Tensor | None, weight: Tensor, bias: Tensor | None) -> Tensor:
            made, logits = functional.linear(rows, weight, bias).chunk(2, -1)
            return functions.gate(made, logits, some)

        def other_edges(first: int, size: int) -> Tensor:
            rows = self.normalise(z.narrow(1, first, size))
            return edges(rows, _lines(mask, first, size), *other_of).permute(0, 3, 1, 2)

        width, channels = z.shape[-1], self.edge_channels
        other = run_parts(self._row_parts(z, width + 4 * channels), other_edges, 2).permute(0, 2, 3, 1)

        def some_rows(first: int, size: int) -> Tensor:
            rows = self.normalise(z.narrow(1, first, size))
            x = functions.multiply_edges(edges(rows, _lines(mask, first, size), *rows_of), other)
            x = self.emit(x)
            return functions.gate(x, self.gate_logits(rows))

        y = run_parts(self._row_parts(z, 3 * width + 5 * channels), some_rows, 1, into)
        return y if self.outgoing or into is not None else y.transpose(1, 2)

    def _weights_of_operands(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return of each operand the weight and bias that make it and then its gate."""
        weight, bias = self.operand_weights(slice(0, self.edge_channels))
        weights, biases = (None if t is None else t.unflatten(0, (2, 2, -1)) for t in (weight, bias))
        assert weights is not None
        return [(weights[:, i].flatten(0, 1), None if biases is None else biases[:, i].flatten(0, 1)) for i in range(2)]

    def channel_parts(self, z: Tensor) -> Parts:
        """Return the parts of the product for a block ``b i j c``, in channels of edges."""
        # Two operands, the gathered one and partial sums, with copies that a batched product makes.
        gathered = self.axes.multiple if self.axes.is_split else 1
        at_once = torch.is_grad_enabled() or not self.axes.is_split
        lines = 7 + 2 * gathered if at_once else 4 + (2 + 2 * gathered) / STEPS
        line = int(z[..., 0].numel() * z.element_size() * lines)
        return Parts.of(self.axes.memory, self.edge_channels, line, multiple=CHANNELS)

    def _row_parts(self, z: Tensor, numbers: int) -> Parts:
        """Return parts in rows of ``b i j c`` that hold so many numbers a pair."""
        return Parts.of(self.axes.memory, z.shape[1], z.shape[0] * z.shape[2] * numbers * z.element_size())

    def _operands_by_rows(self, z: Tensor, mask: Tensor | None, channels: slice) -> Sequence[Tensor]:
        """Return some channels of both operands from pairs, some rows at a time."""
        weight, bias = self.operand_weights(channels)
        # On one rank channels lie first, as the product of matrices needs them; between ranks whole pairs are sent.
        split = self.axes.is_split

        def compute(first: int, size: int) -> Tensor:
            some = None if mask is None else mask.narrow(1, first, size)
            made, logits = functional.linear(self.normalise(z.narrow(1, first, size)), weight, bias).chunk(2, -1)
            both = functions.gate(made, logits, some)
            return both if split else both.permute(0, 3, 1, 2)

        # Within a part in channels, which is recomputed already.
        parts = self._row_parts(z, z.shape[-1] + 2 * weight.shape[0])
        both = run_parts(replace(parts, recompute=parts.count > 1), compute, 1 if split else 2)
        return (both if split else both.permute(0, 2, 3, 1)).chunk(2, -1)

    def _multiply(self, a: Tensor, b: Tensor, axes: Axes) -> Tensor:
        if self.outgoing:
            return edge_product(axes, a, b)
        turned = edge_product(axes.turned, b.transpose(1, 2), a.transpose(1, 2))
        return turned.transpose(1, 2)


class TriangleMultiplication(EdgeMultiplication):
    """Triangle multiplicative update with a layer for each operand and gate."""

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

    @property
    def edge_channels(self) -> int:
        return self.linear_a_p.out_features

    def normalise(self, z: Tensor) -> Tensor:
        y: Tensor = self.layer_norm_in(z)
        return y

    def emit(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear_z(self.layer_norm_out(x))
        return y

    def gate_logits(self, z: Tensor) -> Tensor:
        y: Tensor = self.linear_g(z)
        return y

    def operand_weights(self, channels: slice) -> tuple[Tensor, Tensor | None]:
        layers = [self.linear_a_p, self.linear_b_p, self.linear_a_g, self.linear_b_g]
        weight = torch.cat([layer.weight[channels] for layer in layers])
        bias = None if self.linear_a_p.bias is None else torch.cat([layer.bias[channels] for layer in layers])
        return weight, bias

    def operands(self, z: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return both operands from normalised pairs, and logits of the output's gate.

        Without gradients the logits are None, and nothing is computed before it is used: what one matmul gives is held at once.
        """
        if not torch.is_grad_enabled():
            return self._edges("a", z, mask), self._edges("b", z, mask), None
        layers = [self.linear_a_p, self.linear_a_g, self.linear_b_p, self.linear_b_g, self.linear_g]
        a_p, a_g, b_p, b_g, logits = apply_together(z, layers)
        return functions.gate(a_p, a_g, mask), functions.gate(b_p, b_g, mask), logits

    def _edges(self, name: str, z: Tensor, mask: Tensor | None) -> Tensor:
        """Return an operand, ``a`` or ``b``, from normalised pairs."""
        return functions.gate(getattr(self, f"linear_{name}_p")(z), getattr(self, f"linear_{name}_g")(z), mask)


def _lines(mask: Tensor | None, first: int, size: int) -> Tensor | None:
    return None if mask is None else mask.narrow(1, first, size)


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

    def forward(self, x: Tensor, mask: Tensor | None = None, into: Tensor | None = None) -> Tensor:
        """Return the update, some rows at a time.

        Args:
            x: ``* i j c``, this rank's block.
            mask: ``* i j``, whole on every rank.
            into: what the update is added to, in place; without gradients only. It may be ``x``.

        Returns:
            The update, ``* i j c``, or ``into``.
        """
        lead, axes = x.shape[:-3], self.axes
        target = flat_target(into, 3)
        x, mask = flat(x, 3), flat_mask(mask, lead, 2)
        if not self.starting:
            x, mask, axes = x.transpose(1, 2), None if mask is None else mask.transpose(1, 2), axes.turned
            target = None if target is None else target.transpose(1, 2)
        # The bias is made where the pairs lie: a head is much less to send than a channel.
        bias = pair_bias(axes.memory, self.layer_norm, self.linear, x)
        if self._bias_layout == TRANSPOSED:
            bias = bias.transpose(1, 2)
        y = attend_rows(axes, self.mha, self.layer_norm, x, mask, bias, self._bias_layout, target)
        if into is not None:
            return into
        y = y if self.starting else y.transpose(1, 2)
        return y.reshape(*lead, *y.shape[1:])
