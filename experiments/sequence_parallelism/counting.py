"""Counting: layers that run forward and backward on simulated ranks, what they send and what autograd keeps.

Tensors are meta tensors: they have shapes and no memory, so a layer at the paper's size is counted in milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from experiments.sequence_parallelism.bert import BASE, LARGE, Layer, Shape, Stack, split_sequence
from meshfold.mesh import Mesh, record
from meshfold.mesh.model_io.dry_run import saved_for_backward
from meshfold.mesh.testing import fake_world
from meshfold.sequence import Mask, sequence_sharding, work
from meshfold.tensor_parallel import parallelize

STAGE_LAYERS = 3  # of BERT-Large's 24 on eight stages
TENSOR, RING_SELF, RING = "1d", "ring_self", "ring"
TOKENS, SEQUENCES = 512, 64  # of the volumes; they are proportional to both


class CountError(RuntimeError):
    """Two ranks that should send or keep the same do not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """What one rank sends and keeps in a forward and a backward.

    Attributes:
        forward: bytes sent.
        backward: the same.
        kept: bytes that autograd keeps for backward, parameters left out.
        parameters: of the rank.
    """

    forward: int
    backward: int
    kept: int
    parameters: int


def mesh_of(scheme: str, ranks: int) -> Mesh:
    """The mesh of a scheme: the axis ``tensor`` for 1d, ``seq`` for the others."""
    return Mesh({"tensor" if scheme == TENSOR else "seq": ranks})


def split(model: nn.Module, mesh: Mesh, scheme: str) -> int:
    """Make a serial model this rank's part of a scheme; over how many ranks its sequences are split now."""
    if scheme == TENSOR:
        parallelize(model, mesh, "1d")
        return 1
    split_sequence(model, mesh, scheme)
    return mesh.size("seq")


def count(
    scheme: str,
    ranks: int,
    shape: Shape,
    batch: int,
    length: int,
    *,
    layers: int = 1,
    dtype: torch.dtype = torch.float16,
) -> Counted:
    """Count layers on the first and on the last rank.

    Raises:
        CountError: if these two differ.
    """
    first, last = (_on_rank(scheme, ranks, r, shape, batch, length, layers, dtype) for r in (0, ranks - 1))
    if first != last:
        raise CountError(f"{scheme} on {ranks} ranks: the first rank {first}, the last {last}")
    return first


def _on_rank(
    scheme: str,
    ranks: int,
    rank: int,
    shape: Shape,
    batch: int,
    length: int,
    layers: int,
    dtype: torch.dtype,
) -> Counted:
    with fake_world(ranks, rank):
        mesh = mesh_of(scheme, ranks)
        with torch.device("meta"):
            model = Stack(shape.hidden, shape.heads, layers).to(dtype)
        tokens = length // split(model, mesh, scheme)
        found = watch(model, batch, tokens, shape.hidden, torch.device("meta"), dtype)
        mesh.close()
    return found


def watch(model: nn.Module, batch: int, tokens: int, hidden: int, device: torch.device, dtype: torch.dtype) -> Counted:
    """Run forward and backward of a rank's part and look at what it sends and keeps."""
    x = torch.zeros(batch * tokens, hidden, device=device, dtype=dtype, requires_grad=True)
    parameters = list(model.parameters())
    with record() as log, saved_for_backward(parameters) as saved:
        y = model(x, tokens)
        log.phase = "backward"
        y.backward(torch.ones_like(y))
    sent = log.bytes_by("phase")
    return Counted(
        forward=int(sent.get(("forward",), 0)),
        backward=int(sent.get(("backward",), 0)),
        kept=saved.bytes,
        parameters=sum(parameter.numel() for parameter in parameters),
    )


def volumes(
    base: Sequence[int] = (2, 4, 12), large: Sequence[int] = (2, 4, 8, 16), rings: Sequence[int] = (8, 32, 64)
) -> list[dict[str, Any]]:
    """What a layer sends, in elements (counted in float32, so that sums in float32 are no wider than the rest).

    Args:
        base: ranks of all schemes with BERT-Base.
        large: the same with BERT-Large.
        rings: more ranks for the rings.
    """
    rows = []
    for shape, heads in ((BASE, base), (LARGE, large)):
        for ranks in sorted({*heads, *rings}):
            for scheme in (TENSOR, RING_SELF, RING):
                if (scheme == TENSOR and ranks not in heads) or (scheme != TENSOR and TOKENS % ranks):
                    continue  # 1d splits heads; 12 ranks do not divide 512 tokens
                found = count(scheme, ranks, shape, SEQUENCES, TOKENS, dtype=torch.float32)
                half = count(scheme, ranks, shape, SEQUENCES, TOKENS)
                rows.append(
                    {
                        "model": shape.name,
                        "scheme": scheme,
                        "N": ranks,
                        "B": SEQUENCES,
                        "L": TOKENS,
                        "H": shape.hidden,
                        "Z": shape.heads,
                        "forward": found.forward // 4,
                        "backward": found.backward // 4,
                        "half bytes": half.forward + half.backward,
                    }
                )
    return rows


def activations(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the layers of a stage keep at table 4's sizes, in bytes, in half precision; and a rank's parameters."""
    return [
        {
            **{name: row[name] for name in ("N", "batch", "length")},
            **{
                scheme: {"kept": found.kept, "parameters": found.parameters}
                for scheme in (TENSOR, RING_SELF, RING)
                for found in [count(scheme, row["N"], LARGE, row["batch"], row["length"], layers=STAGE_LAYERS)]
            },
        }
        for row in rows
    ]


def blocks(ranks: Sequence[int] = (2, 4, 8), length: int = 512) -> list[dict[str, Any]]:
    """Elements of the paper's memory formulas: four for each weight, and what the parts of a block put out."""
    return [
        {"scheme": scheme, "N": n, "B": batch, "L": length, "H": LARGE.hidden, "Z": LARGE.heads, **found}
        for n in ranks
        for batch in (16, 48, 128)  # tokens below both crossings, between them, above both
        for scheme in (TENSOR, RING_SELF)
        for found in [_block(scheme, n, batch, length)]
    ]


def _block(scheme: str, ranks: int, batch: int, length: int) -> dict[str, int]:
    put_out: dict[str, int] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
            put_out[name] = out.numel()
            put_out[f"into {name}"] = inputs[0].numel()

        return hook

    scores = [0]

    def pack(x: Tensor) -> Tensor:
        if x.shape[-1:] == (length,):  # as wide as the sequence is long: nothing else is
            scores[0] = max(scores[0], x.numel())
        return x

    with fake_world(ranks):
        mesh = mesh_of(scheme, ranks)
        with torch.device("meta"):
            model = Stack(LARGE.hidden, LARGE.heads, 1)
        tokens = length // split(model, mesh, scheme)
        layer: Layer = model.layers[0]  # type: ignore[assignment]
        parts = {"qkv": layer.attn.qkv, "out": layer.attn.out, "up": layer.up, "down": layer.down}
        for name, module in parts.items():
            module.register_forward_hook(note(name))
        x = torch.zeros(batch * tokens, LARGE.hidden, device="meta", requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(x, tokens)
        weights = {name: module.weight.numel() for name, module in parts.items()}
        mesh.close()
    return {
        "mlp": 4 * (weights["up"] + weights["down"]) + put_out["up"] + put_out["down"],
        "attention": 4 * (weights["qkv"] + weights["out"])
        + put_out["qkv"]
        + put_out["into out"]
        + scores[0]
        + put_out["out"],
    }


def causal_work(ranks: Sequence[int] = (2, 4, 8), length: int = 2048) -> Iterator[dict[str, Any]]:
    """Pairs of a query and a key that the busiest rank computes under a causal mask, over an even share of those seen."""
    mask = Mask(length=length, causal=True)
    for n in ranks:
        even = length * (length + 1) / 2 / n
        mesh = Mesh({"seq": n}, rank=0)
        found = {
            order: max(work(sequence_sharding(length, mesh, "ring", order), mask, rank) for rank in range(n)) / even
            for order in ("zigzag", "contiguous")
        }
        yield {"N": n, **found, RING_SELF: length * length / n / even}
