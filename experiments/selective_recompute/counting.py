"""Bytes that autograd keeps of a layer, counted on simulated ranks at the paper's size, under each scheme of table 2."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from experiments.sequence_parallelism.bert import Layer
from meshfold.mesh import Mesh
from meshfold.mesh.model_io import saved_for_backward
from meshfold.mesh.testing import fake_world
from meshfold.tensor_parallel import parallelize

HIDDEN, HEADS, SEQUENCE, ROWS, RANKS = 6144, 64, 2048, 4, 8  # of the model of 22 billion parameters
SCHEMES: dict[str, dict[str, Any]] = {
    "no parallelism": dict(mode=""),
    "tensor": dict(mode="1d"),
    "tensor + sequence": dict(mode="1d+sequence"),
    "tensor + selective": dict(mode="1d", recompute="selective"),
    "tensor + sequence + selective": dict(mode="1d+sequence", recompute="selective"),
    "full": dict(mode="1d", recompute="full"),
}
"""Table 2's schemes: our mode of tensor parallelism, and what is recomputed."""


def kept(
    mode: str, recompute: str = "none", *, hidden: int = HIDDEN, heads: int = HEADS, sequence: int = SEQUENCE
) -> int:
    """Bytes that autograd keeps of a layer on the first of eight ranks, parameters left out, in half precision."""
    ranks = RANKS if mode else 1
    with fake_world(ranks):
        mesh = Mesh({"tensor": ranks})
        with torch.device("meta"):
            layer = Layer(hidden, heads).to(torch.float16)
        layer.flat_tokens = True  # type: ignore[assignment]
        if mode:
            parallelize(layer, mesh, mode)
        if recompute == "selective":
            layer.attn.attend = partial(_checkpointed, layer.attn.all_scores)
        x = torch.zeros(ROWS * sequence, hidden, device="meta", dtype=torch.float16, requires_grad=True)
        with saved_for_backward(list(layer.parameters())) as saved:
            _checkpointed(layer, x, sequence) if recompute == "full" else layer(x, sequence)
        mesh.close()
    return saved.bytes


def _checkpointed(function: Any, *inputs: Any) -> Tensor:
    """Keep the inputs alone. The reentrant form: it saves them where the counter sees them."""
    made: Tensor = checkpoint(function, *inputs, use_reentrant=True)
    return made
