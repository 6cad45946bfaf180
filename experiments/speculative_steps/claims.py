"""Claims on optimizer steps that do not wait for the norm, beside runs and plans; and the page that shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.report import MARKS, NONE, Case, Cases, Claim, claims_table, markdown, read_claims, verdict

PAGE = """<!-- made from simulated.json by run.py; edit neither -->

# Steps made before the norm is known

{verdict}

{claims}

{marks}

## Trained

{steps} steps of a small model with its states on the host. Steps {ahead} were made ahead; step {clipped} clipped, and was made
again. Losses, norms and weights that differ from those of steps that wait: {differ}.

## On the clock

Milliseconds of a step with clipping. *host*: all states on the host, stepped when the norm is known; *ahead*: the same, stepped
during backward; *planned*: the planner's choice.

{plans}

## Published, two A100s of 40 GB

{published}
"""
GAIN = 1.45
"""SuperOffload's ablation, by an account of the paper."""
QWEN, SMALL, LARGE = "qwen-3b", "5b", "5b-16"
WAYS = ("host", "ahead", "planned")


def claims(found: Mapping[str, Any]) -> list[Claim]:
    """Every claim with its cases."""
    plans, trained = found["plans"], found["trained"]
    printed = {row["system"]: row["ms"] for row in found["published"]}
    offload, zenflow = (printed[f"{name}, cores bound"] for name in ("ZeRO-Offload", "ZenFlow"))
    qwen = plans[QWEN]
    gains = {name: plans[name]["host"] / plans[name]["ahead"] for name in (SMALL, LARGE)}
    wrong = sum(step == trained["clipped"] for step in trained["ahead"])
    own: Cases = {
        "bits": [Case(what, 0, count) for what, count in trained["differ"].items()],
        "rollback": [Case("steps", 1, wrong)],
        "gain": [Case(name, GAIN, gain) for name, gain in gains.items()],
        "chosen": [Case(f"{name}, {way}", one[way], one["planned"]) for name, one in plans.items() for way in WAYS[:2]],
        "offload": [Case("ms", offload, qwen["host"])],
        "zenflow": [Case("ms", zenflow, qwen["planned"])],
        "selective": [Case("quotient", offload / zenflow, qwen["host"] / qwen["planned"])],
        "stale": (),
    }
    numbers: dict[str, Any] = dict(
        made=len(trained["ahead"]), steps=trained["steps"], small=gains[SMALL], large=gains[LARGE], **qwen
    )
    return read_claims(Path(__file__).parent, own, **numbers | {"ratio": qwen["host"] / qwen["planned"]})


def page(found: Mapping[str, Any], made: Sequence[Claim]) -> str:
    """results/table.md."""
    trained = found["trained"]
    plans = [
        [name, *(f"{one[way]:.0f}" for way in WAYS), f"{one['host'] / one['ahead']:.2f}"]
        for name, one in found["plans"].items()
    ]
    return PAGE.format(
        verdict=verdict(made),
        claims=claims_table(made),
        marks=MARKS,
        steps=trained["steps"],
        ahead=", ".join(map(str, trained["ahead"])) or NONE,
        clipped=trained["clipped"],
        differ=", ".join(f"{count} {what}" for what, count in trained["differ"].items()),
        plans=markdown(["model", *WAYS, "gain of ahead"], plans),
        published=markdown(["system", "ms"], [[row["system"], f"{row['ms']:.0f}"] for row in found["published"]]),
    )
