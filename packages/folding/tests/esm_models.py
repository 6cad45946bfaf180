"""Small random folding models of transformers, and the comparison of a split one with the serial one."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import EsmConfig, EsmFold2Config, EsmFold2Model, EsmForProteinFolding
from transformers.utils import logging

from meshfold.folding import MemorySettings, adopt_models, parallelize_folding, sum_gradients
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
    types, mask = (x.to(next(model.parameters()).device) for x in esmfold_inputs(residues))
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
        (y.double() * torch.linspace(-1, 1, y.numel(), dtype=torch.float64, device=y.device).view(y.shape).sin())
        .square()
        .mean()
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
    mode: str,
    axes: dict[str, int],
    *,
    recycles: int = 1,
    residues: int = 7,
    dropout: float = 0.0,
    memory: MemorySettings | None = None,
    device: torch.device | str = "cpu",
) -> None:
    """Raise unless outputs and every gradient of a split ESMFold equal those of transformers' own to 1e-9, on this rank.

    With dropout, those of ours on one rank: transformers draws other elements.
    """
    serial = esmfold(dropout=dropout).to(device)
    split = copy.deepcopy(serial)
    parallelize_folding(split, Mesh(axes), mode, memory=memory or MemorySettings())
    if dropout:
        adopt_models(serial)
    wanted, got = (esmfold_results(model, recycles, residues) for model in (serial, split))
    wrong = differences(wanted, got, 1e-9)
    assert not wrong, f"{len(wrong)} of {len(wanted)} differ:\n" + "\n".join(wrong)


def esmfold2(**changed: Any) -> EsmFold2Model:
    """Return a small ESMFold 2 in float32, with random parameters."""
    atoms = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    rotary = dict(num_spatial_rope_pairs_per_axis=1, num_uid_rope_pairs=1)
    config = EsmFold2Config(
        hidden_size=8,
        pairwise_hidden_size=8,
        single_inputs_size=8 + 2 * 33 + 1,
        pair_transition_intermediate_size=12,
        sliding_window=16,
        chunk_size=3,
        num_loops=1,
        folding_trunk_num_hidden_layers=2,
        parcae_num_coda_layers=1,
        atom_encoder=dict(output_dim=8, **atoms, **rotary),
        structure_head=dict(
            diffusion_module=dict(
                hidden_size=8,
                fourier_dim=8,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=8,
                pair_intermediate_size=8,
                atom_encoder=dict(output_dim=8, **atoms, **rotary),
            ),
            num_diffusion_samples=2,
            num_distogram_bins=8,
            inference_num_steps=3,
        ),
        confidence_head=dict(num_hidden_layers=1, num_plddt_bins=8, num_pde_bins=8, num_pae_bins=8, distogram_bins=8),
        msa_encoder=dict(
            hidden_size=6,
            outer_hidden_size=3,
            num_hidden_layers=2,
            num_attention_heads=2,
            head_dim=3,
            intermediate_size=8,
        ),
        lm_encoder=dict(num_hidden_layers=1),
        esmc_config=dict(
            model_type="esmc", hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
        ),
        **changed,
    )
    model = EsmFold2Model(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


class PairParts(nn.Module):
    """The parts of an ESMFold 2 that hold pair tensors: a stack of pair updates and the MSA encoder."""

    def __init__(self) -> None:
        super().__init__()
        model = esmfold2()
        self.stack, self.encoder = model.folding_trunk, model.msa_encoder

    def forward(self, z: Tensor, single: Tensor, types: Tensor, mask: Tensor, msa_mask: Tensor) -> Tensor:
        """``b r r c -> b r r c``; ``single``: ``b r c``; the types of an MSA ``b r s``; masks ``b r`` and ``b r s``."""
        nothing = torch.zeros_like(msa_mask)
        z = self.stack(z, pair_attention_mask=mask.unsqueeze(1) * mask.unsqueeze(2))
        one_hot = nn.functional.one_hot(types, 33).to(z.dtype) * msa_mask.unsqueeze(-1)
        y: Tensor = self.encoder(z, single, one_hot, nothing, nothing, msa_mask)
        return y


def pair_parts_results(model: nn.Module, dtype: torch.dtype, residues: int = 7) -> dict[str, Tensor]:
    """Return the output at pairs that count, and gradients of inputs and of every parameter."""
    generator = torch.Generator().manual_seed(5)
    z, single = (
        torch.randn(2, residues, *shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((residues, 8), (8 + 2 * 33 + 1,))
    )
    types = torch.randint(0, 20, (2, residues, 3), generator=generator)
    mask = torch.ones(2, residues, dtype=dtype)
    mask[1, -2:] = 0
    msa_mask = (torch.rand(2, residues, 3, generator=generator) > 0.3).to(dtype)
    msa_mask[:, :, 0] = 1
    msa_mask = msa_mask * mask.unsqueeze(-1)
    counts = mask.bool().unsqueeze(1) & mask.bool().unsqueeze(2)
    out = model(z, single, types, mask, msa_mask)[counts]
    (out * torch.linspace(-1, 1, out.numel(), dtype=dtype).view(out.shape).sin()).square().mean().backward()
    sum_gradients(model)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    found = {"pairs": out, "dz": z.grad, "dsingle": single.grad, **gradients}
    return {name: x.detach().clone() for name, x in found.items() if x is not None}


def check_esmfold2(mode: str, axes: dict[str, int], residues: int = 7, memory: MemorySettings | None = None) -> None:
    """Raise unless pairs and every gradient of the split parts equal those of one rank to 1e-9, in float64."""
    whole = adopt_models(PairParts()).double()
    split = copy.deepcopy(whole)
    mesh = Mesh(axes) if max(axes.values()) > 1 else Mesh(axes, rank=0)
    parallelize_folding(split, mesh, mode, memory=memory or MemorySettings())
    wanted, got = (pair_parts_results(model, torch.float64, residues) for model in (whole, split))
    wrong = differences(wanted, got, 1e-9)
    assert not wrong, f"{len(wrong)} of {len(wanted)} differ:\n" + "\n".join(wrong)
