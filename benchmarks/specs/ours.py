"""Meshfold: the engine, with the specs of the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from benchmarks.specs.work import Work

SPECS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "tensor 2": dict(tensor=2),
        "pipeline 2": dict(pipeline=dict(size=2, schedule="zb-h1", microbatches=4)),
        "zero 3": dict(data=2, zero=dict(stage=3, placement="cuda")),
        "zero 3, kept whole": dict(data=2, zero=dict(stage=3, placement="cuda", reshard_after_forward=False)),
        "zero 2": dict(data=2, zero=dict(stage=2, placement="cuda")),
        "sequence 2 × zero 3": dict(sequence=dict(mode="ring", size=2), zero=dict(stage=3, placement="cuda")),
    },
    4: {
        "data 2 × tensor 2": dict(data=2, tensor=2),
        "pipeline 2 × tensor 2": dict(pipeline=dict(size=2, schedule="zb-h1", microbatches=4), tensor=2),
        "zero 3 × tensor 2": dict(data=2, tensor=2, zero=dict(stage=3, placement="cuda")),
        "sequence 2 × zero 3": dict(
            data=2, sequence=dict(mode="ring", size=2), zero=dict(stage=3, placement="cuda")
        ),
        "zero 3": dict(data=4, zero=dict(stage=3, placement="cuda")),
        "zero 3, kept whole": dict(data=4, zero=dict(stage=3, placement="cuda", reshard_after_forward=False)),
        "zero 2": dict(data=4, zero=dict(stage=2, placement="cuda")),
    },
}
"""by how many ranks there are"""


class Ours:
    """See :class:`benchmarks.specs.worker.Trainer`."""

    def __init__(self, work: Work, spec: Mapping[str, Any], *, compiled: bool) -> None:
        from meshfold.engine import Engine

        args = work.args
        self.engine = Engine(
            work.maker(compiled=compiled),
            spec,
            optimizer=dict(name="adamw", lr=args.lr),
            precision=args.precision,
            clip_grad_norm=args.clip,
            lr_scheduler=work.rates,
        )
        self.device, self.rank = self.engine.device, self.engine.mesh.rank
        self.flags = {"parallel": dict(spec), "precision": args.precision, "compiled blocks": compiled}

    def prepare(self, batch: Tensor) -> dict[str, Tensor]:
        mine: Tensor = self.engine.shard_batch(batch).to(self.device)
        return {"input_ids": mine, "labels": mine}

    def step(self, batch: dict[str, Tensor]) -> float:
        return self.engine.train_step(batch)

    def close(self) -> None:
        self.engine.close()
