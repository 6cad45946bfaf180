"""Tables 4, 5, 8 and 10 on a clock, and what ``auto`` finds for the same costs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from experiments.report import read_csv
from experiments.zero_bubble.heuristic import heuristic
from experiments.zero_bubble.searched import searches
from experiments.zero_bubble.settings import FOLDER, Setting, fitted_settings, published_settings
from meshfold.pipeline import Schedule

AUTO_RANKS = 8
NAMES = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-H1": "zb-h1", "ZB-H2": "zb-h2", "ZB-V": "zb-v"}


def everything(auto_ranks: int = AUTO_RANKS, models: Collection[str] = ()) -> dict[str, Any]:
    """All numbers.

    Args:
        auto_ranks: pipelines up to so many ranks are searched by ``auto``; 0: none.
        models: only these; none: all.
    """
    settings = published_settings(models)
    row_of = {one: rates(one) for one in settings}
    return {
        "rates": list(row_of.values()),
        "fitted": [rates_v(one) for one in fitted_settings(models)],
        "auto": searches(list(dict.fromkeys(one.model for one in settings if one.p <= auto_ranks))),
        "throughput": [
            {**row, "simulated": samples(one, row["schedule"], row_of[one])}
            for one in settings
            for row in read_csv(FOLDER / "published_throughput.csv")
            if (row["model"], int(row["microbatches"])) == (one.model, one.m)
        ],
    }


def rates(setting: Setting) -> dict[str, Any]:
    """A row of table 5, and what a step takes where ranks wait for each other behind it."""
    made = {name: published_schedule(setting, name) for name in ("1F1B", "1F1B-I", "ZB-H1", "ZB-H2", "ZB-2p")}
    runs = {name: setting.run(one) for name, one in made.items()}
    more = setting.make_own(heuristic(setting.times, 2 * setting.p, more=True))
    return {
        **head(setting),
        "rate": {name: run.span_bubble for name, run in runs.items()},
        "with a barrier": {name: run.bubble for name, run in runs.items()},
        "activations": {name: max(run.peak) / setting.p for name, run in runs.items()},
        "ZB-2p, one F more": setting.rate(more),
        "p Tcomm less": less_waiting(setting, runs["1F1B-I"].longest_span),
        "least with a barrier": least_with_barrier(setting),
    }


def rates_v(setting: Setting) -> dict[str, Any]:
    """A row of table 8."""
    runs = {name: setting.run(published_schedule(setting, name)) for name in NAMES}
    return {
        **head(setting),
        "rate": {name: run.span_bubble for name, run in runs.items()},
        "p Tcomm less": less_waiting(setting, runs["1F1B-I"].longest_span),
    }


def head(setting: Setting) -> dict[str, Any]:
    """What a row is about."""
    return {"model": setting.model, "p": setting.p, "m": setting.m, "times": asdict(setting.times)}


def published_schedule(setting: Setting, name: str) -> Schedule:
    """What the paper calls so."""
    if name == "ZB-2p":
        return setting.make_own(heuristic(setting.times, 2 * setting.p))
    return setting.make(NAMES[name], setting.chunks if name == "1F1B-I" else None)


def less_waiting(setting: Setting, span: float) -> float:
    """The rate of 1F1B-I if p messages of its longest span were free."""
    return 1 - setting.work / (span - setting.p * setting.times.send)


def least_with_barrier(setting: Setting) -> float:
    """No step between two barriers idles less: the last rank begins when the first micro-batch is there."""
    before = (setting.p - 1) * (setting.times.forward + setting.times.send)
    return before / (before + setting.work)


def samples(setting: Setting, name: str, row: Mapping[str, Any]) -> float:
    """Samples per GPU and second, if a step took no more than the longest span of a rank.

    ZB-1p's is ZB-H1's, as in all rows of table 5.
    """
    rate: float = row["rate"]["ZB-H1" if name == "ZB-1p" else name]
    span = setting.work / (1 - rate)
    return 1000 * setting.b * setting.m / (span * setting.p)
