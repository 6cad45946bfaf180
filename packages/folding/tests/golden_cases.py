"""Sources of the golden numbers: weights and inputs by formula, so that only results are stored."""

from __future__ import annotations

import math

import torch
from folding_models import MSA_SIZES, PAIRFORMER_SIZES, C
from torch import Tensor, nn

from meshfold.folding import EvoformerBlock, ExtraMSABlock, PairFormerBlock, TemplatePairStackBlock

SEQUENCES, RESIDUES = 5, 6


def wave(number: int, *shape: int) -> Tensor:
    """Return sines of the index, the same under every version of torch."""
    index = torch.arange(math.prod(shape), dtype=torch.float64)
    return (1.3 * index + 0.7 * index.square().remainder(17) + number).sin().view(shape)


def fill(named: dict[str, nn.Parameter]) -> None:
    """Give parameters values by their place in the sorted names."""
    with torch.no_grad():
        for number, (_, parameter) in enumerate(sorted(named.items())):
            parameter.copy_(0.4 * wave(number, *parameter.shape))


def mask(number: int, *shape: int) -> Tensor:
    """Return a mask in which no row and no column is masked altogether."""
    found = (wave(number, *shape) > -0.6).double()
    found[..., 0] = 1.0
    found[..., 0, :] = 1.0
    return found


def inputs(kind: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return (tensors, masks)."""
    z, pair_mask = wave(2, 1, RESIDUES, RESIDUES, C), mask(4, 1, RESIDUES, RESIDUES)
    if kind == "template":
        return [z.unsqueeze(1)], [pair_mask.unsqueeze(1)]
    if kind == "pairformer":
        single = torch.ones(1, RESIDUES, dtype=torch.float64)
        single[:, 2] = 0.0
        return [wave(1, 1, RESIDUES, C), z], [single, pair_mask]
    return [wave(1, 1, SEQUENCES, RESIDUES, C), z], [mask(3, 1, SEQUENCES, RESIDUES), pair_mask]


def ours(kind: str) -> nn.Module:
    """Return our block, in float64, without dropout."""
    made: nn.Module
    if kind == "template":
        made = TemplatePairStackBlock(C, 4, 6, 2, 2, 0.0)
    elif kind == "pairformer":
        made = PairFormerBlock(pair_dropout=0.0, **PAIRFORMER_SIZES)
    else:
        block = ExtraMSABlock if kind == "extra" else EvoformerBlock
        made = block(msa_dropout=0.0, pair_dropout=0.0, opm_first=kind == "multimer", **MSA_SIZES)
    return made.double()


KINDS = ("evoformer", "multimer", "extra", "template", "pairformer")


def results(module: nn.Module, named: dict[str, nn.Parameter], kind: str) -> dict[str, list[float]]:
    """Return outputs whole; of each gradient its norm and its product with a wave."""
    tensors, masks = inputs(kind)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    out = module(*leaves, *masks)
    outputs = list(out) if isinstance(out, tuple) else [out]
    loss = sum((wave(9 + number, *y.shape) * y).sum() for number, y in enumerate(outputs))
    assert isinstance(loss, Tensor)
    loss.backward()
    found = {f"output {number}": y.detach().flatten().tolist() for number, y in enumerate(outputs)}
    gradients = {f"input {number}": leaf.grad for number, leaf in enumerate(leaves)}
    gradients |= {name: parameter.grad for name, parameter in sorted(named.items())}
    for name, gradient in gradients.items():
        assert gradient is not None, name
        found[name] = [float(gradient.norm()), float((gradient * wave(5, *gradient.shape)).sum())]
    return found
