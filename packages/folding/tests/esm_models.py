"""Small random folding models of transformers, and the comparison of a split one with the serial one."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import EsmConfig, EsmForProteinFolding
from transformers.utils import logging

from meshfold.folding import adopt_models, parallelize_folding, sum_gradients
from meshfold.mesh import Mesh, dropout_stream

logging.set_verbosity_error()
STRUCTURE = dict(
    sequence_dim=8,
    pairwise_dim=8,
    ipa_dim=4,
    resnet_dim=8,
    num_heads_ipa=2,
    num_qk_points=2,
    num_v_points=2,
    num_blocks=2,
    num_resnet_blocks=1,
    dropout_rate=0.0,
)
TRUNK = dict(
    num_blocks=2,
    sequence_state_dim=16,
    pairwise_state_dim=8,
    sequence_head_width=4,
    pairwise_head_width=4,
    position_bins=4,
    max_recycles=2,
    chunk_size=None,
)
OUTPUTS = (
    "positions",
    "plddt",
    "ptm",
    "ptm_logits",
    "predicted_aligned_error",
    "aligned_confidence_probs",
    "lm_logits",
)


def esmfold(**trunk: Any) -> EsmForProteinFolding:
    """Return a small ESMFold in float64, with random parameters and without dropout unless ``trunk`` says otherwise."""
    config = EsmConfig(
        vocab_size=33,
        mask_token_id=32,
        pad_token_id=1,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        position_embedding_type="rotary",
        token_dropout=True,
        emb_layer_norm_before=False,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        is_folding_model=True,
        esmfold_config=dict(
            fp16_esm=False, lddt_head_hid_dim=8, trunk={**TRUNK, **trunk, "structure_module": STRUCTURE}
        ),
    )
    model = EsmForProteinFolding(config).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def esmfold_inputs(residues: int = 7) -> tuple[Tensor, Tensor]:
    """Return (residue types, mask) of two proteins, the second one shorter."""
    types = torch.randint(0, 20, (2, residues), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(types)
    mask[1, -2:] = 0
    return types, mask


def esmfold_results(model: nn.Module, recycles: int = 1, residues: int = 7) -> dict[str, Tensor]:
    """Return outputs at residues that count, and the gradient of every parameter, after one backward."""
    types, mask = esmfold_inputs(residues)
    with dropout_stream(seed=11, step=3):
        out = model(types, attention_mask=mask, num_recycles=recycles)
    one = mask.bool()
    two = one.unsqueeze(1) & one.unsqueeze(2)
    found: dict[str, Tensor] = {}
    for name in OUTPUTS:
        value = out[name]
        if name == "positions":
            value = value[:, one]
        elif value.dim() > 1:
            value = value[two if value.shape[1] == value.shape[2] == residues else one]
        found[name] = value
    loss = sum(
        (y.double() * torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape).sin()).square().mean()
        for y in found.values()
    )
    assert isinstance(loss, Tensor)
    loss.backward()
    sum_gradients(model)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: x.detach().clone() for name, x in {**found, **gradients}.items()}


def differences(wanted: dict[str, Tensor], got: dict[str, Tensor], tolerance: float) -> list[str]:
    """Return a line for each tensor that differs."""
    assert wanted.keys() == got.keys()
    return [
        f"{name}: {float((a - got[name]).abs().max()):.1e} of {float(a.abs().max()):.1e}"
        for name, a in wanted.items()
        if a.shape != got[name].shape or not torch.allclose(a, got[name], rtol=tolerance, atol=tolerance)
    ]


def check_esmfold(
    mode: str, axes: dict[str, int], *, recycles: int = 1, residues: int = 7, dropout: float = 0.0
) -> None:
    """Raise unless outputs and every gradient of a split ESMFold equal those of transformers' own to 1e-9, on this rank.

    With dropout, those of ours on one rank: transformers draws other elements.
    """
    serial = esmfold(dropout=dropout)
    split = copy.deepcopy(serial)
    parallelize_folding(split, Mesh(axes), mode)
    if dropout:
        adopt_models(serial)
    wanted, got = (esmfold_results(model, recycles, residues) for model in (serial, split))
    wrong = differences(wanted, got, 1e-9)
    assert not wrong, f"{len(wrong)} of {len(wanted)} differ:\n" + "\n".join(wrong)
