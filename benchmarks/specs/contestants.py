"""The rows of the table: Meshfold's specs and the peers, and what builds each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from benchmarks.specs.work import Work

if TYPE_CHECKING:
    from benchmarks.specs.worker import Trainer

SPECS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "tensor 2": dict(tensor=2),
        "pipeline 2": dict(pipeline=dict(size=2, schedule="zb-h1", microbatches=4)),
        "zero 3": dict(data=2, zero=dict(stage=3, placement="cuda")),
        "zero 3, kept whole": dict(data=2, zero=dict(stage=3, placement="cuda", reshard_after_forward=False)),
        "zero 3, pushed": dict(data=2, zero=dict(stage=3, placement="cuda", transport="push")),
        "zero 3, kept whole, pushed": dict(
            data=2, zero=dict(stage=3, placement="cuda", reshard_after_forward=False, transport="push")
        ),
        "zero 2": dict(data=2, zero=dict(stage=2, placement="cuda")),
        "sequence 2 × zero 3": dict(sequence=dict(mode="ring", size=2), zero=dict(stage=3, placement="cuda")),
    },
    4: {
        "data 2 × tensor 2": dict(data=2, tensor=2),
        "pipeline 2 × tensor 2": dict(pipeline=dict(size=2, schedule="zb-h1", microbatches=4), tensor=2),
        "zero 3 × tensor 2": dict(data=2, tensor=2, zero=dict(stage=3, placement="cuda")),
        "sequence 2 × zero 3": dict(data=2, sequence=dict(mode="ring", size=2), zero=dict(stage=3, placement="cuda")),
        "zero 3": dict(data=4, zero=dict(stage=3, placement="cuda")),
        "zero 3, kept whole": dict(data=4, zero=dict(stage=3, placement="cuda", reshard_after_forward=False)),
        "zero 3, pushed": dict(data=4, zero=dict(stage=3, placement="cuda", transport="push")),
        "zero 3, kept whole, pushed": dict(
            data=4, zero=dict(stage=3, placement="cuda", reshard_after_forward=False, transport="push")
        ),
        "zero 2": dict(data=4, zero=dict(stage=2, placement="cuda")),
    },
}
"""by how many ranks there are"""

FP8 = ", fp8"
"""at the end of a spec: matrix products with eight-bit operands, scaled by rows, over tokens those of a rank"""
GATHERED = " gathered"
"""after that: weights that only such products read are gathered in eight bits, too"""

PEERS: dict[str, dict[str, Any]] = {
    "FSDP2": dict(compiled=False, reshard=True),
    "FSDP2 compiled": dict(compiled=True, reshard=True),
    "FSDP2 compiled, kept whole": dict(compiled=True, reshard=False),
}
"""``kept whole``: parameters are gathered once a step (``reshard_after_forward=False``)"""


class Ours:
    """See :class:`benchmarks.specs.worker.Trainer`."""

    def __init__(self, work: Work, spec: Mapping[str, Any], *, compiled: bool, fp8: Mapping[str, Any] | None) -> None:
        from meshfold.engine import Engine

        args = work.args
        precision = args.precision if fp8 is None else dict(name=args.precision, matmul="fp8", **fp8)
        self.engine = Engine(
            work.model,
            spec,
            compile=compiled,
            optimizer=dict(name="adamw", lr=args.lr),
            precision=precision,
            clip_grad_norm=args.clip,
            gradient_accumulation=args.micro_steps,
            lr_scheduler=work.rates,
        )
        self.device, self.rank = self.engine.device, self.engine.mesh.rank
        self.flags = {"parallel": dict(spec), "precision": precision, "compiled blocks": compiled}

        self.micro_steps: int = args.micro_steps

    def prepare(self, batch: Tensor) -> list[dict[str, Tensor]]:
        rows = [self.engine.shard_batch(part).to(self.device) for part in batch.chunk(self.micro_steps)]
        return [{"input_ids": mine, "labels": mine} for mine in rows]

    def step(self, batch: list[dict[str, Tensor]]) -> float:
        return sum(self.engine.train_step(rows) for rows in batch) / self.micro_steps

    def close(self) -> None:
        self.engine.close()


def names(ranks: int) -> list[str]:
    """All contestants on so many ranks."""
    ours = list(SPECS[ranks])
    ends = [f"{FP8}{gathered}{compiled}" for gathered in ("", GATHERED) for compiled in ("", " compiled")]
    fp8 = [f"{name}{end}" for name in ours if name.startswith("zero 3") for end in ends]
    return [*ours, *(f"{name} compiled" for name in ours), *fp8, *PEERS]


def builder(name: str, ranks: int) -> Callable[[Work], Trainer]:
    """What makes a contestant on every rank."""
    if name in PEERS:

        def peer(work: Work) -> Trainer:
            from benchmarks.peers.fsdp2 import FSDP2

            return FSDP2(work, **PEERS[name])

        return peer
    whole = name.removesuffix(" compiled")
    products = whole.removesuffix(GATHERED)
    spec = SPECS[ranks][products.removesuffix(FP8)]
    fp8 = dict(recipe="rowwise", scales="rank", gather="bf16" if products == whole else "fp8")
    return lambda work: Ours(work, spec, compiled=whole != name, fp8=fp8 if products.endswith(FP8) else None)
