"""What is known of Hanayo's numbers, beside what was simulated; and the page that shows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.report import MARKS, Case, Cases, Claim, claims_table, markdown, read_claims, verdict

PAGE = """<!-- made from simulated.json by run.py; edit neither -->

# Hanayo: idle time by waves, published and simulated

{verdict}

{claims}

{marks}

## Idle share

As many micro-batches as ranks, TB + TW = 2 TF, free messages. Simulated, then the formula as it was found,
(2P − 2) / (3PW + P − 1), and idle over all time, (2P − 2) / (3PW + 2P − 2).

{waves}

## Idle share with messages

{ranks} ranks and micro-batches; a message takes so much of TF of a rank's share. Bold: the best of a row.

{messages}
"""


def formula(p: int, waves: int) -> float:
    """As the third party's note has it."""
    return (2 * p - 2) / (3 * p * waves + p - 1)


def over_all(p: int, waves: int) -> float:
    """The same idle time over all time: 3PW of work and 2P − 2 of idleness."""
    return (2 * p - 2) / (3 * p * waves + 2 * p - 2)


def claims(found: Mapping[str, Any]) -> list[Claim]:
    """Every claim with its cases."""

    def cases(published: Callable[[int, int], float], waves: Sequence[int]) -> list[Case]:
        return [
            Case(f"P {row['P']}, W {w}", published(row["P"], w), row["hanayo"][str(w)])
            for row in found["free messages"]
            for w in waves
        ]

    fewer = [
        Case(f"P {row['P']}, W {w}", row["hanayo"][str(w // 2)], row["hanayo"][str(w)])
        for row in found["free messages"]
        for w in (2, 4)
    ]
    own: Cases = {
        "at_most_the_formula": cases(formula, (1, 2, 4)),
        "the_formula_itself": cases(formula, (1, 2, 4)),
        "idle_over_all_time_one_wave": cases(over_all, (1,)),
        "idle_over_all_time_two_and_four_waves": cases(over_all, (2, 4)),
        "more_waves_idle_less": fewer,
        "throughput_over_chimera": (),
    }
    return read_claims(Path(__file__).parent, own)


def page(found: Mapping[str, Any], made: Sequence[Claim]) -> str:
    """results/table.md."""
    waves = [
        [
            str(row["P"]),
            *(
                f"{idle:.4f} / {formula(row['P'], int(w)):.4f} / {over_all(row['P'], int(w)):.4f}"
                for w, idle in row["hanayo"].items()
            ),
            *(f"{idle:.4f}" for idle in row["others"].values()),
            f"{max(row['activations'].values()):.4g}",
        ]
        for row in found["free messages"]
    ]
    first = found["messages"][0]
    others = list(first["others"])
    names = [f"W = {w}" for w in first["hanayo"]]
    messages = []
    for row in found["messages"]:
        idle = [*row["hanayo"].values(), *row["others"].values()]
        cells = [f"**{one:.4f}**" if one == min(idle) else f"{one:.4f}" for one in idle]
        messages.append([f"{row['send']:.2f}", *cells])
    return PAGE.format(
        verdict=verdict(made),
        claims=claims_table(made),
        marks=MARKS,
        ranks=first["P"],
        waves=markdown(["P", *names, *others, "Hanayo's activations, of a rank's share"], waves),
        messages=markdown(["message", *names, *others], messages),
    )
