"""The single representation ``b r c``, r over all axes: attention over residues with a bias of pairs, and pairs of residues.

Keys and values of all residues are small and are gathered. The pair bias is large: an all-to-all brings only the rows of this
rank's queries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshfold.folding import functions
from meshfold.folding.axial.attention import BIAS
from meshfold.folding.axial.axes import Axes
from meshfold.folding.axial.overlap import Coming, begin, redistribute
from meshfold.tensor_parallel import CostEntry

RESIDUES = {"a": 1, "n": 2}


def send_bias(axes: Axes, bias: Tensor) -> Coming:
    """Start to send this rank's block of a pair bias, ``b q k h``, to the ranks of its queries."""
    return begin(axes.move("q:rows k:columns", "q:rows,columns k", BIAS), bias)


def gather_residues(axes: Axes, x: Tensor) -> Tensor:
    """All-gather ``b r c`` along r: this rank's residues to all of them, padding included."""
    return redistribute(axes.move("a n:rows,columns", "a n", RESIDUES), x.unsqueeze(1)).squeeze(1)


def attend_residues(axes: Axes, q: Tensor, k: Tensor, v: Tensor, coming: Coming, mask: Tensor | None) -> Tensor:
    """Attend over all residues, with a pair bias: ``b r h d -> b r h d``.

    Args:
        axes: all of them split the residues.
        q: queries of this rank's residues, ``b r h d``.
        k: keys of this rank's residues.
        v: values of this rank's residues.
        coming: the pair bias, from :func:`send_bias`.
        mask: ``b r``, whole on every rank, without padding; None: all count, and there is no padding.
    """
    keys, values = gather_residues(axes, torch.cat((k, v), -1).flatten(-2)).unflatten(-1, (k.shape[2], -1)).chunk(2, -1)
    key_bias = None
    if mask is not None:
        padding = axes.padded(mask.shape[-1]) - mask.shape[-1]
        key_bias = functions.key_bias_of(mask, torch.promote_types(q.dtype, torch.float32), padding).unsqueeze(1)
    pair_bias = coming.wait().permute(0, 3, 1, 2)
    out = functions.attend(
        q.unsqueeze(1), keys.unsqueeze(1), values.unsqueeze(1), pair_bias, key_bias, axes.memory.chunk_bytes
    )
    return out.squeeze(1)


def residue_pairs(axes: Axes, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two terms of this rank's pairs: x of their rows, ``b i 1 c``, and y of their columns, ``b 1 j c``.

    ``x`` and ``y``, ``b r c``, are of this rank's residues and gathered together.
    """
    whole = gather_residues(axes, torch.cat((x, y), -1))
    rows, columns = whole.split((x.shape[-1], y.shape[-1]), -1)
    return _block(axes, rows, axes.rows).unsqueeze(2), _block(axes, columns, axes.columns).unsqueeze(1)


def attend_residues_cost(axes: Axes, bias_bytes: int, key_bytes: int) -> list[CostEntry]:
    """Return the collectives of :func:`send_bias` and :func:`attend_residues`.

    Args:
        axes: all of them split the residues.
        bias_bytes: of this rank's block of the pair bias, all heads.
        key_bytes: of its keys, all heads; its values have as many.
    """
    bias = axes.move("q:rows k:columns", "q:rows,columns k", BIAS).cost("bias", bias_bytes)
    return bias + gather_residues_cost(axes, "kv", 2 * key_bytes)


def gather_residues_cost(axes: Axes, operand: str, block_bytes: int) -> list[CostEntry]:
    """Return the collectives of :func:`gather_residues`."""
    return axes.move("a n:rows,columns", "a n", RESIDUES).cost(operand, block_bytes)


def _block(axes: Axes, x: Tensor, names: tuple[str, ...]) -> Tensor:
    """Return the block of padded residues that some axes give this rank; differentiable, without a collective."""
    length = x.shape[1] // axes.mesh.size(*names)
    return x.narrow(1, axes.index(names) * length, length)
