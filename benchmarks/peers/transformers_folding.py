"""OpenFold's attention and triangle modules, which transformers has for ESMFold: eager, with all scores in memory."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from benchmarks.peers.absent import AbsentError


def eager_block(ours: Any) -> nn.Module:
    """Return a copy of an Evoformer block that computes as OpenFold does, with the same weights.

    The outer product mean and transitions are plain torch in both.

    Args:
        ours: a block with as many channels of edges as of pairs.

    Raises:
        AbsentError: if transformers is not there, or has no ESMFold.
    """
    try:
        from transformers.models.esm.modeling_esmfold import (
            EsmFoldTriangleAttention,
            EsmFoldTriangleMultiplicativeUpdate,
        )
    except ImportError as error:
        raise AbsentError(f"{error}: install transformers") from error
    block = copy.deepcopy(ours)
    pairs = block.pair_stack
    c_z = pairs.tri_att_start.linear.in_features
    config = SimpleNamespace(pairwise_state_dim=c_z)
    for name in ("tri_mul_out", "tri_mul_in"):
        _replace(pairs, name, EsmFoldTriangleMultiplicativeUpdate(config, _outgoing=name.endswith("out")))
    for name in ("tri_att_start", "tri_att_end"):
        mha = getattr(pairs, name).mha
        made = EsmFoldTriangleAttention(c_z, mha.c_hidden, mha.no_heads, starting=name.endswith("start"))
        _replace(pairs, name, made)
    block.msa_att_row = _EagerRows(block.msa_att_row)
    block.msa_att_col = _EagerColumns(block.msa_att_col._msa_att)
    return block  # type: ignore[no-any-return]


class _EagerRows(nn.Module):
    """Attention within the rows of an MSA by transformers' ``EsmFoldAttention``, with a pair bias if ``ours`` has one."""

    def __init__(self, ours: Any) -> None:
        from transformers.models.esm.modeling_esmfold import EsmFoldAttention

        super().__init__()
        c, mha = ours.mha.linear_q.in_features, ours.mha
        self.layer_norm_m, self.layer_norm_z, self.linear_z = ours.layer_norm_m, ours.layer_norm_z, ours.linear_z
        self.mha = mha
        _replace(self, "mha", EsmFoldAttention(c, c, c, mha.c_hidden, mha.no_heads))

    def forward(self, m: Tensor, z: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Return the update; every sequence counts."""
        m = self.layer_norm_m(m)
        biases = []
        if z is not None:
            biases.append(self.linear_z(self.layer_norm_z(z)).permute(0, 3, 1, 2).unsqueeze(1))
        y: Tensor = self.mha(m, m, biases)
        return y


class _EagerColumns(_EagerRows):
    def forward(self, m: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Return the update of attention within columns; every sequence counts."""
        return super().forward(m.transpose(1, 2)).transpose(1, 2)


def _replace(parent: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in the place of one with the same parameters."""
    before: Any = getattr(parent, name)
    first = next(before.parameters())
    module.to(device=first.device, dtype=first.dtype).load_state_dict(before.state_dict())
    setattr(parent, name, module)
