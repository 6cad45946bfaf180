"""Claims of the LAMB and LARS papers beside losses of a small GPT; and the page that shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.report import MARKS, Case, Cases, Claim, claims_table, markdown, read_claims, verdict

PAGE = """<!-- made from measured.json by run.py; edit neither -->

# Large batches: LAMB and LARS beside AdamW and SGD

{verdict}

{claims}

{marks}

## Loss on held-out text

{samples:,} sequences of {length} characters, each seen once; {steps}. Guessing has a loss of {guess:.3f}; what is worse, or
diverged, counts as that.

{losses}

## Rates at the small batch

{tried}
"""


def claims(found: Mapping[str, Any]) -> list[Claim]:
    """Every claim with its cases: a case is a batch."""
    losses = {name: one["losses"] for name, one in found["methods"].items()}
    small, large = str(found["setting"]["small"]), [str(batch) for batch in found["setting"]["large"]]

    def kept(name: str) -> list[Case]:
        return [Case(f"{name}, batch {batch}", losses[name][small], losses[name][batch]) for batch in large]

    def below(name: str, other: str, batches: Sequence[str]) -> list[Case]:
        return [Case(f"{name}, batch {batch}", losses[other][batch], losses[name][batch]) for batch in batches]

    cases: Cases = {
        "lamb_below_adamw": below("LAMB", "AdamW", large),
        "lars_below_sgd": below("LARS", "SGD", large[1:]),
        "lars_below_sgd_near": below("LARS", "SGD", large[:1]),
        "lamb_keeps": kept("LAMB"),
        "lars_keeps": kept("LARS"),
        "adamw_keeps": kept("AdamW"),
        "sgd_keeps": kept("SGD"),
    }
    return read_claims(Path(__file__).parent, cases)


def page(found: Mapping[str, Any], made: Sequence[Claim]) -> str:
    """results/table.md."""
    setting = found["setting"]
    batches = [setting["small"], *setting["large"]]
    steps = ", ".join(f"{setting['samples'] // batch:,} steps at {batch}" for batch in batches)
    losses = [
        [name, f"{one['rate']:g}", *(f"{loss:.3f}" for loss in one["losses"].values())]
        for name, one in found["methods"].items()
    ]
    tried = [
        [name, ", ".join(f"{rate}: {loss:.3f}" for rate, loss in one["tried"].items())]
        for name, one in found["methods"].items()
    ]
    return PAGE.format(
        verdict=verdict(made),
        claims=claims_table(made),
        marks=MARKS,
        samples=setting["samples"],
        length=setting["length"],
        steps=steps,
        guess=found["guess"],
        losses=markdown(["optimizer", f"rate at {batches[0]}", *(f"batch {batch}" for batch in batches)], losses),
        tried=markdown(["optimizer", "rate: loss"], tried),
    )
