"""Rows of torchtitan's tables in bf16 by plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.report import read_csv
from experiments.toml_tables import read_tables
from meshfold.mesh import ParallelSpec
from meshfold.models import Llama, LlamaConfig
from meshfold.planner import Machine, estimate, find_machine, step_speed, step_times

FOLDER = Path(__file__).resolve().parent
VOCABULARY = 128_256
PRECISION = "bf16"


@dataclass(frozen=True, kw_only=True)
class Size:
    """A Llama by its sizes: a table of settings.toml."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int

    def build(self, tokens: int) -> Llama:
        """Return the model for sequences of so many tokens."""
        return Llama(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden=self.hidden,
                layers=self.layers,
                heads=self.heads,
                kv_heads=self.kv_heads,
                ffn=self.inner,
                max_positions=tokens,
            )
        )


def node() -> Machine:
    """Return the benchmarks' machine: H100s of 96 GB HBM2e with 2.4 TB/s, 400 Gb/s a GPU between hosts, and a limit of 500 W.

    Links and matmuls are the preset's; its memory reaches 0.87 of the data sheet's rate, and so does this one. Half a GiB is
    CUDA's. The limit of power is not on the clock. Source: benchmarks/llama3_h100_202412_torchtitan.md of pytorch/torchtitan.
    """
    return replace(find_machine("h100x8"), memory=94.5 * 2**30, memory_rate=0.87 * 2.4e12)


def everything() -> dict[str, Any]:
    """All numbers."""
    sizes = read_tables(FOLDER / "settings.toml", Size)
    rows = read_csv(FOLDER / "published.csv")
    plans: dict[str, dict[str, float]] = {}
    found = []
    for row in rows:
        made: dict[str, Any] = {key: row[key] for key in ("row", "model", "kind", "technique")}
        made |= {key: int(row[key]) for key in ("gpus", "data", "tensor", "context", "sequence")}
        made["published"] = float(row["TPS"])
        if row["kind"] == "bf16":
            same = " ".join(row[key] for key in ("model", "gpus", "technique"))
            if row["technique"] == "async":
                made["ours"] = plans[same.replace("async", "compile")]
            else:
                plans[same] = made["ours"] = plan(sizes[row["model"]], row)
        found.append(made)
    return {"rows": found}


def plan(size: Size, row: Mapping[str, str], machine: Machine | None = None) -> dict[str, float]:
    """Return tokens a second of a GPU, and GiB; and what they would be with all traffic of tensor parallelism beside the layers.

    What *selective* recomputation keeps is up to the plan: as many blocks as the GPU holds, or none beside tensor parallelism.
    """
    machine = machine or node()
    data, tensor, tokens = (int(row[key]) for key in ("data", "tensor", "sequence"))
    parallel: dict[str, object] = {"data": data, "zero": dict(stage=3, placement="cuda")}
    recompute = "blocks"
    if tensor > 1:
        parallel |= {"tensor": dict(mode="1d", size=tensor, overlap="gather"), "sequence": dict(mode="megatron")}
    elif row["saved"] == "selective":
        parallel["zero"], recompute = dict(stage=3, placement="auto"), "auto"
    found = estimate(
        lambda: size.build(tokens),
        ParallelSpec.parse(parallel),
        batch_size=int(row["rows"]) * data,
        seq_len=tokens,
        precision=PRECISION,
        machine=machine,
        recompute=recompute,
        kernels="off" if row["technique"] == "eager" else "auto",
    )
    speed, times = step_speed(found, machine, PRECISION), step_times(found, machine, PRECISION)
    own = speed.tokens_per_second / found.world_size
    hidden = max(times.compute, times.tensor, times.data, speed.seconds - times.tensor)
    return {"TPS": own, "GiB": found.memory.total / 2**30, "MFU": speed.mfu, "most": own * speed.seconds / hidden}
