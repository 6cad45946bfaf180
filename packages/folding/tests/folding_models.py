"""Small models and inputs of the folding tests, and the comparison of a split model with the whole one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from meshfold.folding import (
    AxialMode,
    EvoformerStack,
    ExtraMSAStack,
    MemorySettings,
    PairFormerStack,
    TemplatePairStack,
    find_axial_mode,
    parallelize_folding,
    sum_gradients,
)
from meshfold.folding.memory import KEEP_ALL
from meshfold.mesh import Mesh, dropout_stream

C = 8
MSA_SIZES = dict(
    c_m=C,
    c_z=C,
    c_hidden_msa_att=4,
    c_hidden_opm=3,
    c_hidden_mul=6,
    c_hidden_pair_att=4,
    no_heads_msa=2,
    no_heads_pair=2,
    transition_n=2,
)
PAIRFORMER_SIZES = dict(
    c_s=C,
    c_z=C,
    c_hidden_pair_bias=4,
    no_heads_pair_bias=2,
    c_hidden_mul=6,
    c_hidden_pair_att=4,
    no_heads_pair=2,
    transition_n=2,
)

MODELS: dict[str, Callable[[int, float], nn.Module]] = {
    "evoformer": lambda n, p: EvoformerStack(no_blocks=n, c_s=5, msa_dropout=p, pair_dropout=p, **MSA_SIZES),
    "multimer": lambda n, p: EvoformerStack(
        no_blocks=n, c_s=5, msa_dropout=p, pair_dropout=p, opm_first=True, **MSA_SIZES
    ),
    "extra": lambda n, p: ExtraMSAStack(no_blocks=n, msa_dropout=p, pair_dropout=p, **MSA_SIZES),
    "template": lambda n, p: TemplatePairStack(C, 4, 6, n, 2, 2, p),
    "pairformer": lambda n, p: PairFormerStack(n, pair_dropout=p, **PAIRFORMER_SIZES),
}
"""Models by name, made of (blocks, dropout)."""


def randomise(module: nn.Module, seed: int = 1) -> nn.Module:
    """Give every parameter random values: AlphaFold's begin at zero, which would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    return module


def model_of(kind: str, blocks: int, dropout: float) -> nn.Module:
    """Make a model with random float64 parameters."""
    return randomise(MODELS[kind](blocks, dropout))


def inputs_of(kind: str, sequences: int, residues: int, batch: int = 1) -> tuple[list[Tensor], list[Tensor]]:
    """Make (tensors that need a gradient, masks), whole and the same on every rank. Some rows are masked altogether."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, C, generator=generator, dtype=torch.float64)

    present = torch.ones(batch, residues, dtype=torch.float64)
    present[:, residues // 2] = 0.0
    pair_mask = present.unsqueeze(-1) * present.unsqueeze(-2)
    z = random(residues, residues)
    if kind == "template":
        return [random(3, residues, residues)], [pair_mask.unsqueeze(1)]
    if kind == "pairformer":
        return [random(residues), z], [present, pair_mask]
    msa_mask = (torch.rand(batch, sequences, residues, generator=generator) > 0.25).double() * present.unsqueeze(1)
    return [random(sequences, residues), z], [msa_mask, pair_mask]


def results_of(model: nn.Module, tensors: list[Tensor], masks: list[Tensor | None], step: int = 5) -> list[Tensor]:
    """Return outputs, gradients of inputs and of every parameter, after one backward under a dropout stream."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    with dropout_stream(seed=11, step=step):
        out = model(*leaves, *masks)
    outputs = list(out) if isinstance(out, tuple) else [out]
    loss = sum(
        (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view(y.shape).sin()).square().sum()
        for y in outputs
    )
    assert isinstance(loss, Tensor)
    loss.backward()
    sum_gradients(model)
    found = [*outputs, *(leaf.grad for leaf in leaves), *(p.grad for p in model.parameters())]
    return [torch.zeros(()) if x is None else x.detach() for x in found]


def check_equal(
    kind: str,
    mode: str | AxialMode,
    axes: dict[str, int],
    *,
    sequences: int = 8,
    residues: int = 7,
    blocks: int = 1,
    dropout: float = 0.25,
    masked: bool = True,
    attention: str = "",
    product_steps: int = 1,
    memory: MemorySettings = KEEP_ALL,
    device: torch.device | str = "cpu",
) -> None:
    """Raise unless outputs and every gradient equal those of one rank to 1e-9, on this rank."""
    tensors, masks = ([x.to(device) for x in some] for some in inputs_of(kind, sequences, residues))
    given: list[Tensor | None] = list(masks) if masked else [None] * len(masks)
    row = find_axial_mode(mode)
    row = replace(row, attention=attention) if attention else row
    names = [n for n, _ in model_of(kind, blocks, dropout).named_parameters()]
    whole = model_of(kind, blocks, dropout).to(device)
    parallelize_folding(whole, Mesh(dict.fromkeys(row.axes, 1), rank=0), row)
    split = model_of(kind, blocks, dropout).to(device)
    parallelize_folding(split, Mesh(axes), row, product_steps=product_steps, memory=memory)
    wanted, got = results_of(whole, tensors, given), results_of(split, tensors, given)
    labels = [f"output or input gradient {i}" for i in range(len(got) - len(names))] + names
    wrong = [
        f"{label}: {float((a - b).abs().max()):.1e} of {float(a.abs().max()):.1e}"
        for label, a, b in zip(labels, wanted, got, strict=True)
        if a.shape != b.shape or not bool(torch.allclose(a, b, rtol=1e-9, atol=1e-9))
    ]
    assert not wrong, f"{len(wrong)} of {len(labels)} differ:\n" + "\n".join(wrong)
