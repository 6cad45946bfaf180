"""The pair stacks and the MSA encoder of ESMFold 2 on blocks of pair tensors, with transformers' parameter names.

:func:`meshfold.folding.adopt_models` puts them in the place of transformers' own, with the same parameters. The MSA lies as
``b r s c`` here: its residues are split over all axes, and every rank has all its sequences.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshfold.folding import functions
from meshfold.folding.axial.axes import WHOLE, Axes
from meshfold.folding.axial.residues import (
    attend_residues_cost,
    gather_residues,
    gather_residues_cost,
    residue_pairs,
    send_bias,
)
from meshfold.folding.axial.sizes import Sizes, join_cost, split_cost
from meshfold.folding.memory import Parts, add_update, own_tensor, run_block, run_parts, some_lines
from meshfold.folding.primitives import LayerNorm
from meshfold.folding.stack import Shapes, Stack
from meshfold.folding.triangle import EdgeMultiplication
from meshfold.tensor_parallel import CostEntry


class WideLayerNorm(LayerNorm):
    """LayerNorm that computes in float32 or wider and returns the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        """``.. c -> .. c``."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return functions.layer_norm(x.to(wide), self.weight.to(wide), self.bias.to(wide), self.eps).to(x.dtype)


class PackedSwiGLU(nn.Module):
    """``down(up · silu(gate))``, gate and up from one layer."""

    def __init__(self, c: int, c_hidden: int) -> None:
        """Args:
        c: channels.
        c_hidden: channels between the layers.
        """
        super().__init__()
        self.gate_up_proj = nn.Linear(c, 2 * c_hidden, bias=False)
        self.down_proj = nn.Linear(c_hidden, c, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``.. c -> .. c``."""
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        y: Tensor = self.down_proj(up * functional.silu(gate))
        return y


class ResidualTransition(nn.Module):
    """``x + swiglu(norm(x))``, some rows at a time."""

    def __init__(self, c: int, c_hidden: int, chunk_size: int | None) -> None:
        """Args:
        c: channels.
        c_hidden: channels between the layers.
        chunk_size: rows at a time, at most; None: all.
        """
        super().__init__()
        self.norm = WideLayerNorm(c)
        self.mlp = PackedSwiGLU(c, c_hidden)
        self.chunk_size = chunk_size
        self.axes: Axes = WHOLE

    def forward(self, x: Tensor, in_place: bool = False) -> Tensor:
        """``b r .. c -> b r .. c``; ``in_place``: change ``x`` and return it; without gradients only."""
        line = (
            x[:, :1].numel() // x.shape[-1] * (2 * x.shape[-1] + 4 * self.mlp.down_proj.in_features) * x.element_size()
        )
        parts = Parts.of(self.axes.memory, x.shape[1], line)
        least = -(-x.shape[1] // (self.chunk_size or max(x.shape[1], 1)))
        parts = replace(parts, count=max(parts.count, least))

        def compute(first: int, size: int) -> Tensor:
            y: Tensor = self.mlp(self.norm(some_lines(x, 1, first, size)))
            return y

        return run_parts(parts, compute, 1, x) if in_place else x + run_parts(parts, compute, 1)


class PackedTriangleMultiplication(EdgeMultiplication):
    """Triangle multiplicative update whose factors and gates come from one layer."""

    def __init__(self, c_z: int, *, outgoing: bool) -> None:
        """Args:
        c_z: channels of pairs, and of edges.
        outgoing: multiply outgoing edges, else incoming ones.
        """
        super().__init__()
        self.outgoing = outgoing
        self.norm_start = WideLayerNorm(c_z)
        self.norm_mix = WideLayerNorm(c_z)
        self.proj_bundle = nn.Linear(c_z, 4 * c_z, bias=False)
        self.proj_emit = nn.Linear(c_z, c_z, bias=False)
        self.proj_gate = nn.Linear(c_z, c_z, bias=False)
        self.axes: Axes = WHOLE

    @property
    def edge_channels(self) -> int:
        return self.proj_emit.in_features

    def normalise(self, z: Tensor) -> Tensor:
        y: Tensor = self.norm_start(z)
        return y

    def emit(self, x: Tensor) -> Tensor:
        y: Tensor = self.proj_emit(self.norm_mix(x))
        return y

    def gate_logits(self, z: Tensor) -> Tensor:
        y: Tensor = self.proj_gate(z)
        return y

    def operand_weights(self, channels: slice) -> tuple[Tensor, Tensor | None]:
        return self.proj_bundle.weight.unflatten(0, (4, -1))[:, channels].flatten(0, 1), None

    def operands(self, z: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        signal, logits = self.proj_bundle(z).chunk(2, -1)
        a, b = functions.gate(signal, logits, None if mask is None else mask.to(z.dtype)).chunk(2, -1)
        return a, b, None


class PairUpdateLayer(nn.Module):
    """Two triangle multiplications and a transition."""

    def __init__(self, c_z: int, c_transition: int, chunk_size: int | None) -> None:
        """Args:
        c_z: channels of pairs.
        c_transition: channels between the layers of the transition.
        chunk_size: rows of a transition at a time; None: all.
        """
        super().__init__()
        self.tri_mul_out = PackedTriangleMultiplication(c_z, outgoing=True)
        self.tri_mul_in = PackedTriangleMultiplication(c_z, outgoing=False)
        self.pair_transition = ResidualTransition(c_z, c_transition, chunk_size)
        self.axes: Axes = WHOLE

    def update(self, z: Tensor, mask: Tensor | None = None, in_place: bool = False) -> Tensor:
        """``b i j c -> b i j c``, this rank's block; ``mask``: ``b i j``, whole on every rank.

        ``in_place``: change ``z`` and return it; without gradients only.
        """
        for multiply in (self.tri_mul_out, self.tri_mul_in):
            z = add_update(z, multiply, z, mask, in_place=in_place)
        y: Tensor = self.pair_transition(z, in_place)
        return y

    def forward(self, z: Tensor, mask: Tensor | None = None, in_place: bool = False) -> Tensor:
        """Return :meth:`update`, which backward computes again if the settings of memory say so."""
        y: Tensor = run_block(self.axes.memory, self.update, z, mask, in_place)
        return y


class PairUpdateStack(Stack):
    """Pair updates of whole tensors: each rank takes its block before them, and all ranks gather the result."""

    def __init__(self, no_blocks: int, c_z: int, c_transition: int, chunk_size: int | None) -> None:
        """``no_blocks``: layers; the rest as for :class:`PairUpdateLayer`."""
        super().__init__(no_blocks=no_blocks, c_z=c_z, c_transition=c_transition, chunk_size=chunk_size)
        self.c_z = c_z
        self.layers = nn.ModuleList(PairUpdateLayer(c_z, c_transition, chunk_size) for _ in range(no_blocks))

    @property
    def blocks(self) -> nn.ModuleList:  # type: ignore[override]
        """The layers: they have transformers' name among the modules."""
        return self.layers

    def shapes(self, sizes: Sizes) -> tuple[Shapes, Shapes]:
        b, r = sizes.batch, sizes.residues
        return {"pair_states": (b, r, r, self.c_z)}, {"pair_attention_mask": (b, r, r)}

    def own_traffic(self, sizes: Sizes) -> list[CostEntry]:
        """Return the collectives of splitting and joining."""
        return _split_and_join_cost(self.axes, sizes, self.c_z)

    def forward(self, pair_states: Tensor, pair_attention_mask: Tensor | None = None) -> Tensor:
        """``b i j c -> b i j c``, whole; mask: ``b i j``."""
        r = pair_states.shape[1]
        self.choose_memory(pair_states, residues=r, batch=pair_states.shape[0])
        axes = self.axes
        mask = _mask_of(axes, pair_states, pair_attention_mask)
        z = own_tensor(axes.split(pair_states, (1, axes.rows), (2, axes.columns)), pair_states)
        for layer in self.layers:
            z = layer(z, mask, not torch.is_grad_enabled())
        return axes.join(z, (1, axes.rows, r), (2, axes.columns, r))


class PackedOuterProductMean(nn.Module):
    """Outer product mean over the sequences of an MSA, both factors from one layer."""

    def __init__(self, c_m: int, c_hidden: int, c_z: int) -> None:
        """Args:
        c_m: channels of the MSA.
        c_hidden: channels of each factor.
        c_z: channels of pairs.
        """
        super().__init__()
        self.norm = WideLayerNorm(c_m)
        self.input_proj = nn.Linear(c_m, 2 * c_hidden, bias=False)
        self.output_proj = nn.Linear(c_hidden**2, c_z)
        self.axes: Axes = WHOLE

    def traffic(self, sizes: Sizes) -> list[CostEntry]:
        """Return every collective of forward and backward."""
        block = sizes.single(self.axes, self.input_proj.out_features * sizes.sequences)
        return gather_residues_cost(self.axes, "pairs", block)

    def forward(self, m: Tensor, mask: Tensor) -> Tensor:
        """``b r s c_m -> b i j c_z``, this rank's residues to its block of pairs; ``mask``: ``b r s``, whole on every rank."""
        axes = self.axes
        own = axes.take(mask, 1, axes.all)
        factors = self.input_proj(self.norm(m)) * own.unsqueeze(-1).to(m.dtype)
        left, right = (factor.flatten(2) for factor in factors.chunk(2, -1))
        rows, columns = (x.unflatten(-1, (mask.shape[2], -1)) for x in residue_pairs(axes, left, right))
        y = functions.outer_products(
            rows.squeeze(2).transpose(1, 2),
            columns.squeeze(1).transpose(1, 2),
            self.output_proj.weight,
            self.output_proj.bias,
        )
        of_rows, of_columns = (axes.take(mask, 1, names).to(y.dtype) for names in (axes.rows, axes.columns))
        return y / (of_rows @ of_columns.transpose(1, 2)).clamp(min=1.0).unsqueeze(-1)


class PairWeightedAveraging(nn.Module):
    """Average over residues with weights from pairs, the same for all sequences of an MSA (Algorithm 10 of AlphaFold 3)."""

    def __init__(self, c_m: int, c_z: int, c_hidden: int, no_heads: int) -> None:
        """Args:
        c_m, c_z: channels of the MSA and of pairs.
        c_hidden: channels of a head.
        no_heads: heads.
        """
        super().__init__()
        self.no_heads = no_heads
        width = no_heads * c_hidden
        self.norm_single = WideLayerNorm(c_m)
        self.bias_norm = WideLayerNorm(c_z)
        self.bias_proj = nn.Linear(c_z, no_heads, bias=False)
        self.v_proj = nn.Linear(c_m, width, bias=False)
        self.gate_proj = nn.Linear(c_m, width, bias=False)
        self.o_proj = nn.Linear(width, c_m, bias=False)
        self.axes: Axes = WHOLE

    def traffic(self, sizes: Sizes) -> list[CostEntry]:
        """Return every collective of forward and backward."""
        axes = self.axes
        values = sizes.single(axes, self.v_proj.out_features * sizes.sequences)
        bias = attend_residues_cost(axes, sizes.pair(axes, self.no_heads), 0)
        return [entry for entry in bias if entry.bytes] + gather_residues_cost(axes, "v", values)

    def forward(self, m: Tensor, z: Tensor, pair_mask: Tensor) -> Tensor:
        """Return the update: ``b r s c_m``, this rank's residues.

        Args:
            m: ``b r s c_m``.
            z: ``b i j c_z``, this rank's block.
            pair_mask: ``b r r``, whole on every rank and without padding.
        """
        axes, (sequences, size) = self.axes, (m.shape[2], pair_mask.shape[-1])
        coming = send_bias(axes, self.bias_proj(self.bias_norm(z)))
        x = self.norm_single(m)
        values = gather_residues(axes, self.v_proj(x).flatten(2)).unflatten(-1, (sequences, self.no_heads, -1))
        bias = coming.wait()[:, :, :size]
        own = axes.take(pair_mask, 1, axes.all).bool().unsqueeze(-1)
        bias = bias.masked_fill(~own, torch.finfo(bias.dtype).min)
        weights = torch.softmax(bias, 2, dtype=torch.promote_types(bias.dtype, torch.float32)).to(bias.dtype)
        out = torch.einsum("bijh,bjshd->bishd", weights, values[:, :size]).flatten(-2)
        y: Tensor = self.o_proj(functions.gate(out, self.gate_proj(x)))
        return y


class MSAEncoderLayer(PairUpdateLayer):
    """Outer product mean to pairs, weighted averaging to the MSA, and a pair update."""

    def __init__(
        self,
        c_m: int,
        c_z: int,
        c_outer: int,
        c_hidden: int,
        no_heads: int,
        c_msa_transition: int,
        c_transition: int,
        chunk_size: int | None,
        updates_msa: bool,
    ) -> None:
        """Args:
        c_m, c_z: channels of the MSA and of pairs.
        c_outer: channels of each factor of the outer product.
        c_hidden: channels of a head of the averaging.
        no_heads: heads there.
        c_msa_transition, c_transition: channels between the layers of each transition.
        chunk_size: rows of a transition at a time; None: all.
        updates_msa: False for the last layer, whose MSA nobody reads.
        """
        super().__init__(c_z, c_transition, chunk_size)
        self.updates_msa = updates_msa
        self.outer_product_mean = PackedOuterProductMean(c_m, c_outer, c_z)
        if updates_msa:
            self.msa_pair_weighted_averaging = PairWeightedAveraging(c_m, c_z, c_hidden, no_heads)
            self.msa_transition = ResidualTransition(c_m, c_msa_transition, chunk_size)

    def forward(  # type: ignore[override]
        self, m: Tensor, z: Tensor, msa_mask: Tensor, pair_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the next MSA, ``b r s c_m``, and pairs, ``b i j c_z``; blocks of this rank, with masks that are whole."""
        z = z + self.outer_product_mean(m, msa_mask)
        if self.updates_msa:
            m = m + self.msa_pair_weighted_averaging(m, z, pair_mask)
            m = self.msa_transition(m)
        return m, self.update(z, pair_mask, not torch.is_grad_enabled())  # z is this layer's own by now


class MSAEncoder(nn.Module):
    """Layers that condition pairs on an MSA. Tensors are whole: each rank takes its block before them, and all ranks gather the
    result."""

    def __init__(self, embed: nn.Linear, project_inputs: nn.Linear, layers: list[MSAEncoderLayer], c_z: int) -> None:
        """Args:
        embed: of an MSA's features.
        project_inputs: of single inputs.
        layers: the layers.
        c_z: channels of pairs.
        """
        super().__init__()
        self.embed, self.project_inputs, self.c_z = embed, project_inputs, c_z
        self.layers = nn.ModuleList(layers)
        self.axes: Axes = WHOLE

    def own_traffic(self, sizes: Sizes) -> list[CostEntry]:
        """Return the collectives of splitting and joining."""
        axes, block = self.axes, sizes.single(self.axes, self.embed.out_features * sizes.sequences)
        return split_cost(axes, "m", block, (axes.all, sizes.residues)) + _split_and_join_cost(axes, sizes, self.c_z)

    def forward(
        self,
        pair_states: Tensor,
        single_inputs: Tensor,
        msa_one_hot: Tensor,
        has_deletion: Tensor,
        deletion_value: Tensor,
        msa_attention_mask: Tensor,
    ) -> Tensor:
        """Return pairs ``b r r c_z``, whole.

        Args:
            pair_states: ``b r r c_z``.
            single_inputs: ``b r c``.
            msa_one_hot: types of residues, ``b r s types``.
            has_deletion, deletion_value, msa_attention_mask: ``b r s``.
        """
        axes, r = self.axes, pair_states.shape[1]
        features = torch.cat((msa_one_hot, has_deletion.unsqueeze(-1), deletion_value.unsqueeze(-1)), -1)
        m = self.embed(features.to(self.embed.weight.dtype)) + self.project_inputs(single_inputs).unsqueeze(2)
        present = msa_attention_mask[:, :, 0].bool()
        pair_mask = present.unsqueeze(2) & present.unsqueeze(1)
        m = axes.split(m, (1, axes.all))
        z = axes.split(pair_states, (1, axes.rows), (2, axes.columns))
        for layer in self.layers:
            m, z = layer(m, z, msa_attention_mask, pair_mask)
        return axes.join(z, (1, axes.rows, r), (2, axes.columns, r))


def _mask_of(axes: Axes, z: Tensor, mask: Tensor | None) -> Tensor | None:
    """Return the mask, or one of ones where there is padding and no mask."""
    return z.new_ones(z.shape[:-1]) if mask is None and axes.is_split else mask


def _split_and_join_cost(axes: Axes, sizes: Sizes, c_z: int) -> list[CostEntry]:
    z, dims = sizes.pair(axes, c_z), [(axes.rows, sizes.residues), (axes.columns, sizes.residues)]
    return split_cost(axes, "z", z, *dims) + join_cost(axes, "z", z, *dims)
