"""Rows of torchtitan's tables in bf16 by plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.report import read_csv
from experiments.toml_tables import read_tables
from meshfold.mesh import ParallelSpec
from meshfold.mesh.model_io import REPEATED
from meshfold.models import Llama, LlamaConfig
from meshfold.planner import Machine, estimate, find_machine, step_speed, step_times, under_power_cap
from meshfold.planner.clock import Work, operator_seconds

FOLDER = Path(__file__).resolve().parent
VOCABULARY = 128_256
PRECISION = "bf16"
WATTS = 500.0
HIDDEN = 0.57
"""Share of a collective that matmuls hide, as ``meshfold calibrate`` measured it on H100s: 0.54 to 0.59 on two and four."""
ATTENTION = 0.35
"""Share of an H100's peak that FlashAttention-2 reaches (abstract of FlashAttention-3, arXiv 2407.08608): theirs on GPUs."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A Llama by its sizes: a table of settings.toml."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int

    @property
    def kept_outputs(self) -> int:
        """Outputs a token of the products of a block that *selective* recomputation keeps, every second one, from the first.

        Products run in the order queries, keys, values, result of attention, gate, up, down.
        """
        return 2 * self.hidden + self.hidden * self.kv_heads // self.heads + self.inner

    @property
    def repeated(self) -> float:
        """Share of a block's products that it repeats: of keys, of attention's result, up."""
        keys = self.hidden * self.kv_heads // self.heads
        return (keys + self.hidden + self.inner) / (2 * keys + 2 * self.hidden + 3 * self.inner)

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

    Links and matmuls are the preset's, matmuls at the clock that the limit leaves; its memory reaches 0.87 of the data sheet's
    rate, and so does this one. Half a GiB is CUDA's. Source: benchmarks/llama3_h100_202412_torchtitan.md of pytorch/torchtitan.
    """
    preset = find_machine("h100x8")
    share = ATTENTION * preset.peak(PRECISION) / (preset.flops[PRECISION] * preset.efficiency.matmuls)
    reached = replace(preset.efficiency, hidden=HIDDEN, attention={128: share})
    return under_power_cap(
        replace(preset, memory=94.5 * 2**30, memory_rate=0.87 * 2.4e12, efficiency=reached), watts=WATTS
    )


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

    *Selective* recomputation keeps results of attention and of every second product. Its plan is that of blocks that keep
    attention alone, without the seconds of the products that need not be repeated, and with the bytes that they take.
    """
    machine = machine or node()
    data, tensor, tokens = (int(row[key]) for key in ("data", "tensor", "sequence"))
    parallel: dict[str, object] = {"data": data, "zero": dict(stage=3, placement="cuda")}
    if tensor > 1:
        parallel |= {"tensor": dict(mode="1d", size=tensor, overlap="gather"), "sequence": dict(mode="megatron")}
    selective = row["saved"] == "selective"
    found = estimate(
        lambda: size.build(tokens),
        ParallelSpec.parse(parallel),
        batch_size=int(row["rows"]) * data,
        seq_len=tokens,
        precision=PRECISION,
        machine=machine,
        recompute="but-attention" if selective else "blocks",
        kernels="off" if row["technique"] == "eager" else "auto",
    )
    speed, times = step_speed(found, machine, PRECISION), step_times(found, machine, PRECISION)
    own = tokens * int(row["rows"]) / tensor
    saved = (1.0 - size.repeated) * _repeated_products(found.work, machine) if selective else 0.0
    kept = 2 * size.layers * size.kept_outputs * own if selective else 0.0
    seconds = speed.seconds - saved
    hidden = max(times.compute - saved, times.tensor, times.data, seconds - times.tensor)
    return {
        "TPS": own / seconds,
        "GiB": (found.memory.total + kept) / 2**30,
        "MFU": speed.mfu * speed.seconds / seconds,
        "most": own / hidden,
    }


def _repeated_products(work: Work, machine: Machine) -> float:
    """Return the seconds of a step's products that recomputation repeats."""
    return sum(
        count * operator_seconds(operator, machine, PRECISION)
        for operator, count in work.operators.items()
        if operator.phase == REPEATED and operator.flop and not operator.head_dim
    )
