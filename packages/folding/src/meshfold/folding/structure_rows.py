"""The structure module of ESMFold on the rows of pairs that a rank has, without gradients: whole pairs exist nowhere.

Its invariant point attention (Jumper et al. 2021, supplement, Algorithm 22) makes 288 numbers for each pair in every layer, more
than the trunk. Rows of residues do not need one another: each rank computes its own, some at a time, and all get the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.folding.axial.axes import Axes
from meshfold.folding.memory import MemorySettings, Parts, run_parts

SHARE = 8
"""A part of rows has as many bytes of intermediates as this share of the rank's pairs."""
LEAST_PART = 64 << 20
"""But at least so many, or as many as the pairs: more parts than needed only take time."""


@dataclass(frozen=True, eq=False)
class PairRows:
    """A rank's rows of pairs, with all columns.

    Attributes:
        pairs: ``b i r c``; i with padding, r without.
        axes: how rows are split.
    """

    pairs: Tensor
    axes: Axes

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's rows of a tensor of all residues along ``dim``; zero in padding."""
        return self.axes.take(x, dim, self.axes.rows)

    def run(self, compute: Callable[[int, int], Tensor], dim: int, line_bytes: int) -> Tensor:
        """Compute something of every row, some rows at a time, and return that of all residues, on every rank.

        Args:
            compute: returns it for a first row of this rank and a number of rows.
            dim: of the rows in it.
            line_bytes: of a row's intermediates.
        """
        lines, residues = self.pairs.shape[1:3]
        part = _part_bytes(self.pairs.numel() * self.pairs.element_size())
        own = run_parts(Parts.of(MemorySettings(chunk_bytes=part), lines, line_bytes, gradients=False), compute, dim)
        return self.axes.join(own, (dim, self.axes.rows, residues))


def rows_bytes(pairs: Tensor, line_bytes: int) -> int:
    """Return the bytes of a rank's pairs, :attr:`PairRows.pairs`, and of the intermediates of :meth:`PairRows.run` with them."""
    own = pairs.numel() * pairs.element_size()
    return own + min(line_bytes * pairs.shape[1], _part_bytes(own) + line_bytes)


def _part_bytes(pairs: int) -> int:
    """Return the bytes of a part's intermediates, from those of a rank's rows of pairs."""
    return max(pairs // SHARE, min(LEAST_PART, pairs), 1)


def run_structure_module(
    module: Any, single: Tensor, rows: PairRows, to_pairs: nn.Module, types: Tensor, mask: Tensor
) -> dict[str, Any]:
    """Return what transformers' structure module returns, the same on every rank.

    Args:
        module: ``EsmFoldStructureModule``.
        single: the single representation, whole.
        rows: this rank's pairs of the trunk.
        to_pairs: from the channels of the trunk's pairs to those of the module's.
        types: residue types.
        mask: 1 for a residue that counts.
    """
    norm, ipa = module.layer_norm_z, module.ipa

    def pairs(first: int, size: int) -> Tensor:
        y: Tensor = norm(to_pairs(rows.pairs.narrow(1, first, size)))
        return y

    def attend(s: Tensor, z: None, rigids: Any, mask: Tensor, **_: Any) -> Tensor:
        return attend_points(ipa, s, rows, pairs, rigids, mask)

    with _replaced(module, layer_norm_z=lambda pair: pair, ipa=attend):
        found: dict[str, Any] = module({"single": single, "pair": None}, types, mask)
    return found


def attend_points(
    ipa: Any, s: Tensor, rows: PairRows, pairs: Callable[[int, int], Tensor], rigids: Any, mask: Tensor
) -> Tensor:
    """Return the update of invariant point attention, as ``EsmFoldInvariantPointAttention`` does.

    Args:
        ipa: that module.
        s: the single representation, ``b r c``.
        rows: this rank's rows.
        pairs: returns normalized pairs ``b i r c`` of some of these rows.
        rigids: a frame for each residue.
        mask: ``b r``.
    """
    heads, points = ipa.num_heads, ipa.num_qk_points
    queries = rows.take(ipa.linear_q(s).unflatten(-1, (heads, -1)))
    keys, values = ipa.linear_kv(s).unflatten(-1, (heads, -1)).split(ipa.hidden_dim, -1)
    query_points = rows.take(_in_frames(ipa.linear_q_points(s), rigids, heads))
    key_points, value_points = _in_frames(ipa.linear_kv_points(s), rigids, heads).split([points, ipa.num_v_points], -2)
    weights = ipa.softplus(ipa.head_weights).unsqueeze(-1) * (1.0 / (3 * (points * 9.0 / 2))) ** 0.5
    own_mask = rows.take(mask)
    keys, values = keys.permute(0, 2, 3, 1), values.transpose(1, 2)
    value_points = value_points.transpose(1, 2).flatten(-2)

    def compute(first: int, size: int) -> Tensor:
        some: Callable[[Tensor], Tensor] = partial(torch.narrow, dim=1, start=first, length=size)
        z = pairs(first, size)
        a = some(queries).transpose(1, 2) @ keys
        a *= (1.0 / (3 * ipa.hidden_dim)) ** 0.5
        a += (1.0 / 3) ** 0.5 * ipa.linear_b(z).permute(0, 3, 1, 2)
        apart = (some(query_points).unsqueeze(2) - key_points.unsqueeze(1)).pow_(2).sum(-1)
        near = (apart * weights).sum(-1) * -0.5
        counts = some(own_mask).unsqueeze(2) * mask.unsqueeze(1)
        a = ipa.softmax(a + near.permute(0, 3, 1, 2) + (ipa.config.inf * (counts - 1)).unsqueeze(1))
        of_singles = (a @ values.to(a.dtype)).transpose(1, 2)
        of_points = (a @ value_points.to(a.dtype)).transpose(1, 2)
        of_pairs = a.transpose(1, 2) @ z.to(a.dtype)
        return torch.cat([of_singles.flatten(2), of_points.flatten(2), of_pairs.flatten(2)], -1)

    out = rows.run(compute, 1, line_bytes(ipa, rows.pairs))
    singles, in_space, of_pairs = out.split(_widths(ipa), -1)
    in_space = rigids[..., None, None].invert_apply(in_space.unflatten(-1, (heads, ipa.num_v_points, 3)))
    lengths = (in_space.square().sum(-1) + ipa.config.epsilon).sqrt().flatten(2)
    joined = torch.cat([singles, *in_space.flatten(2, 3).unbind(-1), lengths, of_pairs], -1)
    update: Tensor = ipa.linear_out(joined.to(s.dtype))
    return update


def output_channels(ipa: Any) -> int:
    """Return the numbers of a residue that ranks send one another in :func:`attend_points`."""
    return sum(_widths(ipa))


def _widths(ipa: Any) -> list[int]:
    """Return the channels of what attention sums: singles, points and pairs."""
    heads: int = ipa.num_heads
    return [heads * ipa.hidden_dim, heads * ipa.num_v_points * 3, heads * ipa.linear_b.in_features]


def line_bytes(ipa: Any, pairs: Tensor) -> int:
    """Return the bytes of what :func:`attend_points` has at once for a row of pairs ``b i r c``."""
    wide = max(pairs.element_size(), 4)
    spread: int = ipa.num_heads * (3 * ipa.num_qk_points + ipa.num_qk_points + 4)
    channels: int = ipa.linear_b.in_features
    return pairs.shape[0] * pairs.shape[2] * (spread * wide + channels * (3 * pairs.element_size() + wide))


def structure_bytes(ipa: Any, pairs: Tensor) -> int:
    """Return the bytes of pairs and intermediates while the structure module runs; ``pairs``: :attr:`PairRows.pairs`."""
    return rows_bytes(pairs, line_bytes(ipa, pairs))


def _in_frames(x: Tensor, rigids: Any, heads: int) -> Tensor:
    """Return points in the frame of their residues, ``b r h p 3``, from ``b r (3 h p)``."""
    points: Tensor = rigids[..., None].apply(torch.stack(x.chunk(3, -1), -1)).unflatten(2, (heads, -1))
    return points


@contextmanager
def _replaced(module: nn.Module, **instead: Any) -> Iterator[None]:
    """Context manager: a module's forward finds other functions under the names of its submodules."""
    module.__dict__.update(instead)  # found before submodules, which stay registered
    try:
        yield
    finally:
        for name in instead:
            del module.__dict__[name]
