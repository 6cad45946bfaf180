"""One rank of ``meshfold reproduce zero-bubble --measure N``: schedules run for real, beside the clock with measured times."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from experiments.measuring import Measured, Notes, median, shared_cores
from experiments.report import markdown, read_csv
from experiments.zero_bubble.claims import published
from experiments.zero_bubble.heuristic import Times, heuristic
from experiments.zero_bubble.settings import FOLDER
from meshfold.mesh import Mesh, shift
from meshfold.models import GPT, GPTConfig
from meshfold.pipeline import Costs, Pipeline, simulate_costs

SCHEDULES: dict[str, dict[str, Any]] = {
    "1F1B": {"schedule": "1f1b"},
    "1F1B-I, 2 chunks": {"schedule": "interleaved", "chunks": 2},
    "ZB-H1": {"schedule": "zb-h1"},
    "ZB-H2": {"schedule": "zb-h2"},
    "ZB-V": {"schedule": "zb-v"},
}
PAGE = """<!-- made from measured.json by run.py --measure; edit neither -->

# Zero bubble: schedules that ran

{ranks} ranks on {device}, {kind}; GPT with {layers} layers of {hidden}, {sequence} tokens, {microbatches} micro-batches of {rows};
median of {repeats} steps. Times of F, B and W were measured stage by stage, a message ({send:.3g} ms) by sending activations
round the ranks. *Idle*: 1 − work / time between two barriers, measured with everything else that a step takes. *Paper*: of this
model on any number of ranks with as many micro-batches a rank, from samples per second (table 4; ZB-2p with a barrier: table 10).

{table}

{verdict}
"""


def measure(notes: Notes) -> None:
    """Run every schedule on a mesh of all ranks."""
    with closing(Mesh({"pipe": notes.ranks})) as mesh:
        Measurement(notes, mesh).run()


class Measurement:
    """All schedules of one model on the ranks of a mesh."""

    def __init__(self, notes: Notes, mesh: Mesh) -> None:
        self.notes, self.options, self.device = notes, notes.options, notes.device
        self.mesh, self.group = mesh, mesh.group("pipe")
        options = self.options
        self.config = GPTConfig(
            vocab_size=options.vocabulary,
            hidden=options.hidden,
            layers=options.layers,
            heads=options.heads,
            max_positions=options.sequence,
            tie=False,
        )
        generator = torch.Generator().manual_seed(0)
        shape = (options.rows * options.microbatches, options.sequence)
        tokens = torch.randint(options.vocabulary, shape, generator=generator)
        self.batch = {"input_ids": tokens, "labels": tokens}
        self.costs: list[Costs] = []

    def run(self) -> None:
        """Measure a message, then every schedule; ``auto`` and the paper's heuristic with the times that 1F1B's stages took."""
        send = self.message()
        self.notes.head["send"] = 1e3 * send
        for name, how in SCHEDULES.items():
            self.notes.add(name, partial(self.one, name, how, send))
        for name, how in searched(self.costs[0], send, self.group.size).items():
            self.notes.add(name, partial(self.one, name, how, send))

    def message(self) -> float:
        """Seconds of sending a micro-batch's activations to the next rank."""
        o = self.options
        x = torch.zeros(o.rows * o.sequence, o.hidden, dtype=self.notes.dtype, device=self.device)
        return median(lambda: shift(x, self.group), 20, self.group, self.device)

    def one(self, name: str, how: Mapping[str, Any], send: float) -> dict[str, Any]:
        """A schedule's time, beside what the clock says of its list with the times of its stages."""
        pipeline = Pipeline(
            lambda: GPT(self.config),
            self.mesh,
            microbatches=self.options.microbatches,
            device=self.device,
            dtype=self.notes.dtype,
            **how,
        )
        parameters = list(pipeline.parameters())
        losses: list[float] = []

        def step() -> None:
            for parameter in parameters:
                parameter.grad = None
            losses.append(float(pipeline.step(self.batch)))

        step()
        alone = pipeline.measure(self.batch)
        costs = Costs(
            forward=alone.forward,
            backward_input=alone.backward_input,
            backward_weight=alone.backward_weight,
            send=send,
        )
        seconds = median(step, self.options.repeats, self.group, self.device)
        made = pipeline.program(self.options.microbatches).schedule
        clock = simulate_costs(made, costs)
        self.costs.append(costs)
        return {
            "schedule": name,
            "seconds": seconds,
            "simulated seconds": clock.makespan,
            "idle": 1 - sum(clock.busy) / (len(clock.busy) * seconds),
            "simulated idle": clock.bubble,
            "activations": max(clock.peak) / made.chunks,
            "loss": losses[0],
        }


def searched(costs: Costs, send: float, ranks: int) -> dict[str, dict[str, Any]]:
    """ZB-2p by the paper's heuristic, which wants one time for all stages, and ``auto``, which takes them as they are."""
    table = costs.for_stages(ranks).durations
    f, b, w = (statistics.mean(one[op] for one in table) for op in ("F", "B", "W"))  # type: ignore[index]
    times = Times(forward=f, backward_input=b, backward_weight=w, send=send)
    bound = {"costs": costs, "memory": 2 * ranks}
    return {
        "ZB-2p (heuristic)": {"schedule": heuristic(times, 2 * ranks), **bound},
        "auto, 2 p": {"schedule": "auto", **bound},
    }


def page(found: Mapping[str, Any]) -> str:
    """measured.md."""
    rows = found["schedules"]
    base = rows[0]["seconds"]
    paper = published_gains(found)
    table = markdown(
        [
            "schedule",
            "ms a step",
            "simulated",
            "1F1B's time over it",
            "paper",
            "idle",
            "simulated",
            "activations of p",
        ],
        [
            [
                row["schedule"],
                f"{1e3 * row['seconds']:.1f}",
                f"{1e3 * row['simulated seconds']:.1f}",
                f"{base / row['seconds']:.3f}",
                f"{paper[row['schedule']]:.3f}" if row["schedule"] in paper else "–",
                f"{row['idle']:.1%}",
                f"{row['simulated idle']:.1%}",
                f"{row['activations'] / found['ranks']:.2f}",
            ]
            for row in rows
        ],
    )
    return PAGE.format(
        **{key: value for key, value in found.items() if key != "schedules"}, table=table, verdict=said(found)
    )


def published_gains(found: Mapping[str, Any]) -> dict[str, float]:
    """1F1B's time over each schedule's that the paper printed for the model that ran, with as many micro-batches a rank."""
    ran = tuple(found[name] for name in ("layers", "hidden", "sequence", "rows"))
    each = found["microbatches"] / found["ranks"]
    names = ("layers", "hidden", "sequence", "microbatch_size")
    alike = (
        key
        for key, row in published("published_costs.csv").items()
        if tuple(int(row[name]) for name in names) == ran and int(row["m"]) / int(row["p"]) == each
    )
    setting = next(alike, None)
    if setting is None:
        return {}
    speed = {
        row["schedule"]: float(row["samples_per_gpu_s"])
        for row in read_csv(FOLDER / "published_throughput.csv")
        if (row["model"], int(row["microbatches"])) == setting
    }
    gains = {"1F1B": 1.0, "ZB-H1": speed["ZB-1p"] / speed["1F1B"]}
    if barrier := published("published_barrier.csv").get(setting):
        gains["ZB-2p (heuristic)"] = float(barrier["synchronized"]) / speed["1F1B"]
    return gains


def said(found: Mapping[str, Any]) -> str:
    """How near measured idle time is to the clock's, whether the order of schedules is the clock's, and the losses."""
    rows = found["schedules"]
    far = max(abs(row["idle"] - row["simulated idle"]) for row in rows)
    measured = min(rows, key=lambda row: row["seconds"])["schedule"]
    clock = min(rows, key=lambda row: row["simulated seconds"])["schedule"]
    losses = {row["loss"] for row in rows}
    same = "the same to the bit" if len(losses) == 1 else f"from {min(losses):.8g} to {max(losses):.8g}"
    return " ".join(
        [
            f"Idle time is within {100 * far:.1f} points of the clock's. Fastest: {measured}; on the clock: {clock}.",
            f"First losses are {same}.",
            *shared_cores(found),
        ]
    )


MEASURED = Measured(
    file=__file__,
    about=__doc__,
    sizes=(  # Sizes; on GPUs by default the paper's 1.5B model with half as many micro-batches, for half as many ranks.
        ("layers", 8, 22, None),
        ("hidden", 128, 2304, None),
        ("heads", 4, 24, None),
        ("sequence", 128, 1024, None),
        ("vocabulary", 512, 50304, None),
        ("rows", 2, 6, None),
        ("microbatches", 8, 12, None),
        ("repeats", 5, 7, None),
    ),
    shown=("layers", "hidden", "sequence", "microbatches", "rows", "repeats"),
    run=measure,
    page=page,
    key="schedules",
)
main = MEASURED.main

if __name__ == "__main__":
    sys.exit(main())
