"""What the paper says, beside what was counted, run and planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.report import Case, Claim, read_csv
from experiments.sequence_parallelism.claims_table4 import memory, sizes, throughput
from experiments.sequence_parallelism.counting import RING, RING_SELF, TENSOR
from experiments.sequence_parallelism.plan import FOLDER

Row = Mapping[str, Any]
EXACT = 1e-9


def claims(found: Mapping[str, Any]) -> list[Claim]:
    """Every claim with its cases."""
    return [
        *_volumes(found),
        *_blocks(found),
        *memory(found),
        *throughput(found),
        *sizes(found),
        *_runs(found),
    ]


def formulas() -> dict[str, str]:
    """The published formulas in Python's notation, by id."""
    return {row["id"]: row["formula"] for row in read_csv(FOLDER / "published_formulas.csv")}


def value(formula: str, row: Row) -> float:
    """A formula at the sizes of a row."""
    names = {name: row[name] for name in "NBLHZ"}
    return float(eval(formula, {"__builtins__": {}}, {**names, "A": row["H"] // row["Z"]}))


def _volumes(found: Mapping[str, Any]) -> list[Claim]:
    printed = formulas()
    rows: list[Row] = found["volumes"]

    def cases(scheme: str, name: str) -> list[Case]:
        return [
            Case(f"{row['model']}, N {row['N']}, {phase}", value(printed[f"{name}-{phase}"], row), row[phase])
            for row in rows
            if row["scheme"] == scheme
            for phase in ("forward", "backward")
        ]

    sums = {(row["model"], row["N"], row["scheme"]): row["forward"] + row["backward"] for row in rows}
    return [
        Claim(
            name="what ring self-attention sends",
            claim="Ring self-attention sends 2(N−1)·BZ(L/N)A elements forward and 6(N−1)·BZ(L/N)A backward, a layer and rank",
            mark="P",
            cases=cases(RING_SELF, "rsa"),
            tolerance=EXACT,
            because="""Counted: keys and values go round once forward; backward both again, and dK and dV of the whole sequence \
are summed by ring all-reduce. The MLP sends nothing.""",
        ),
        Claim(
            name="what tensor parallelism sends",
            claim="Megatron's layer sends 4(N−1)·BZ(L/N)A each way",
            mark="P",
            cases=cases(TENSOR, "tp"),
            tolerance=EXACT,
            because="Counted: two ring all-reduces of the residual stream each way.",
        ),
        Claim(
            name="the same in sum",
            claim="In sum a layer of both sends the same, 8(N−1)·BZ(L/N)A",
            mark="P",
            cases=[
                Case(f"{model}, N {n}", 1.0, sums[model, n, RING_SELF] / sums[model, n, TENSOR])
                for model, n, scheme in sums
                if scheme == TENSOR and (model, n, RING_SELF) in sums
            ],
            tolerance=EXACT,
            because="""Counted. In neither sum: gradients of parameters, which sequence parallelism has to add up over its ranks \
once a step, 2(N−1)/N · 12H² a layer.""",
        ),
        Claim(
            name="our ring sends (6N − 4) in place of 8(N − 1)",
            claim="Our ring sends 2(N−1)·BZ(L/N)A forward and (4N−2)·BZ(L/N)A backward",
            mark="ours",
            cases=[
                Case(
                    f"{row['model']}, N {row['N']}, {phase}",
                    times * row["B"] * row["L"] / row["N"] * row["H"],
                    row[phase],
                )
                for row in rows
                if row["scheme"] == RING
                for phase, times in (("forward", 2 * row["N"] - 2), ("backward", 4 * row["N"] - 2))
            ],
            tolerance=EXACT,
            because="Counted: dK and dV travel with their block and arrive after N hops, in place of two all-reduces.",
        ),
    ]


def _blocks(found: Mapping[str, Any]) -> list[Claim]:
    printed = formulas()
    scheme_of = {TENSOR: "tp", RING_SELF: "sp"}
    blocks = {(row["N"], row["B"], row["scheme"]): row for row in found["blocks"]}
    crossings = []
    for n, batch, scheme in blocks:
        if scheme == TENSOR:
            tp, sp = blocks[n, batch, TENSOR], blocks[n, batch, RING_SELF]
            tokens = batch * tp["L"]
            for part, bound in (("mlp", 32 * tp["H"]), ("attention", 16 * tp["H"])):
                crossings.append(
                    Case(f"{part}, N {n}, BL {tokens}", float(tokens > bound), float(sp[part] < tp[part]))
                )
    return [
        Claim(
            name="memory formulas of MLP and attention",
            claim="Elements of weights, their gradients and moments, and of what the blocks put out: four formulas",
            mark="P",
            cases=[
                Case(f"{part}, {name}, N {n}, B {batch}", value(printed[f"{part}-{name}"], row), row[part])
                for (n, batch, scheme), row in blocks.items()
                for name in [scheme_of[scheme]]
                for part in ("mlp", "attention")
            ],
            tolerance=EXACT,
            because="Counted from the local tensors of a layer: 4 for each weight, outputs of the linear layers, and scores.",
        ),
        Claim(
            name="where sequence parallelism needs less",
            claim="Sequence parallelism needs less memory than tensor parallelism where BL > 32H (MLP), BL > 16AZ (attention)",
            mark="P",
            cases=crossings,
            tolerance=EXACT,
            because="Counted with tokens below, between and above both bounds.",
        ),
    ]


def _runs(found: Mapping[str, Any]) -> list[Claim]:
    rows: list[Row] = found["runs"]
    rings = [row for row in rows if row["scheme"] != TENSOR]
    theirs: Sequence[Row] = read_csv(FOLDER / "published_gradients.csv")
    four = next(row for row in rows if row["scheme"] == RING_SELF and row["N"] == 4)
    return [
        Claim(
            name="output and gradients of one process",
            claim="Layers on 2 and 4 CPU ranks have the output and input gradient of one process, in float64",
            mark="ours",
            cases=[
                Case(f"{row['scheme']}, N {row['N']}, {what}", 0.0, row[f"{what} error"])
                for row in rows
                for what in ("output", "gradient")
            ],
            tolerance=EXACT,
            because="Run over gloo: tensor parallelism, ring self-attention, our ring; dropout off.",
        ),
        Claim(
            name="dQ, dK and dV whole",
            claim="dQ, dK and dV of both rings are 1 times those of one process",
            mark="ours",
            cases=[
                Case(f"{row['scheme']}, N {row['N']}, {name}", 1.0, row[f"{name} ratio"])
                for row in rings
                for name in ("dQ", "dK", "dV")
            ],
            tolerance=EXACT,
            because="The same runs; projections of a rank's gradient on the wanted one.",
        ),
        Claim(
            name="counts on ranks that are there",
            claim="What ranks with values send and keep equals the counts on simulated ranks",
            mark="ours",
            cases=[
                Case(f"{row['scheme']}, N {row['N']}, {what}", row[f"planned {what}"], row[what])
                for row in rows
                for what in ("sent", "kept")
            ],
            tolerance=EXACT,
            because="The same layers with dropout on, recorded in the runs, byte by byte.",
        ),
        Claim(
            name="Colossal-AI's gradients",
            claim="Gradients of Colossal-AI's ring operators on 4 ranks, in those of one process",
            mark="run",
            cases=[
                Case(
                    f"{row['operator']}, {row['gradient']}",
                    float(row["ratio"]),
                    four[f"{row['gradient']} ratio"],
                )
                for row in theirs
            ],
            tolerance=EXACT,
            because="""Theirs divide dQ, dK and dV by the number of ranks, within the tolerance of their tests. Ours must not; \
memory and time are the same.""",
            expected=False,
        ),
    ]
