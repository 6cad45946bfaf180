"""QLoRA's frozen base (Dettmers et al. 2023, arXiv 2305.14314): linear layers in four bits, of which nothing is trained.

The packed weights are parameters of bytes without gradients, so that ``zero`` shards them, moves them and gathers them for
the layer that runs like all others.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshfold.kernels import NF4_BLOCK, Nf4Linear
from meshfold.mesh import SpecError

NF4 = "nf4"


def pack_linears(model: nn.Module) -> list[str]:
    """Put a packed layer in the place of each linear layer but the head; full names of those that stay as they are.

    A row whose length is no multiple of the block stays as it is too.

    Raises:
        SpecError: if that is so of all.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    left = []
    for path, module in list(model.named_modules()):
        for leaf, child in list(module.named_children()):
            if type(child) is not nn.Linear:
                continue
            if child is head or child.in_features % NF4_BLOCK:
                left.append(f"{path}.{leaf}" if path else leaf)
            else:
                module._modules[leaf] = Nf4Linear.of(child)
    if not any(isinstance(module, Nf4Linear) for module in model.modules()):
        raise SpecError(
            f"pretrained(quantize={NF4!r}) would pack nothing of {type(model).__name__}: it packs layers of type "
            f"torch.nn.Linear, the head aside, with rows of a multiple of {NF4_BLOCK} elements; leave quantize out"
        )
    return left


def unpacked_twins(model: nn.Module) -> dict[Tensor, Tensor]:
    """From each packed weight of a model to a tensor without values of the shape that it stands for."""
    return {
        module.weight: torch.empty(module.out_features, module.in_features, device="meta")
        for module in model.modules()
        if isinstance(module, Nf4Linear)
    }
