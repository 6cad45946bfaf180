"""Make a finding smaller: take parts of its case away as long as the same thing goes wrong."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from integration_tests.fuzz.cases import Case
from integration_tests.fuzz.judge import Verdict, judge

_KEPT = {
    "input",
    "hidden",
    "tokens",
    "vocab",
    "kind",
    "names",
    "wide",
    "heads",
    "name",
    "step",
    "cell",
    "batch_first",
    "tokens_first",
    "how",
    "features",
}
_PLAIN: dict[str, Any] = dict(
    then=None,
    then_ranks=0,
    optimizer=dict(name="sgd", lr=0.5),
    clip={},
    accumulation=1,
    steps=1,
    ignored=0.0,
    recompute=None,
    made="module",
    scheduler=False,
    rules=False,
    rows=4,
    dropout=0.0,
    loop="train_step",
)


def smaller(case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Cases that have one thing less."""
    for name, value in _PLAIN.items():
        if case.get(name, value) != value:
            yield {**case, name: value}
    for entry in case["spec"]:
        rest = case["spec"][entry]
        if isinstance(rest, dict):
            for key in rest:
                if key not in ("mode", "size", "grid", "depth", "stage", "ulysses"):
                    yield {
                        **case,
                        "spec": {**case["spec"], entry: {k: v for k, v in rest.items() if k != key}},
                    }
        if entry == "zero":
            yield {**case, "spec": {k: v for k, v in case["spec"].items() if k != entry}}
    yield from ({**case, "model": model} for model in _smaller_models(case["model"]))


def _smaller_models(of: Any) -> Iterator[Any]:
    if isinstance(of, list):
        for place in range(len(of)):
            if len(of) > 1:
                yield of[:place] + of[place + 1 :]
            for less in _smaller_models(of[place]):
                yield [*of[:place], less, *of[place + 1 :]]
    elif isinstance(of, dict):
        for key, value in of.items():
            if key not in _KEPT and key not in ("blocks", "parts", "inner"):
                yield {k: v for k, v in of.items() if k != key}
            if key == "norm" and value != "none":
                yield {**of, key: "none"}
            if isinstance(value, dict | list):
                for less in _smaller_models(value):
                    yield {**of, key: less}


def shrink(case: Case, verdict: Verdict) -> tuple[Case, Verdict]:
    """The smallest case found with the same kind of finding."""
    words = _sign(verdict)
    changed = True
    while changed:
        changed = False
        for less in smaller(json.loads(case.to_json())):
            try:
                trial = Case(**copy.deepcopy(less))
                found = judge(trial)
            except Exception:
                continue
            if found.kind == "finding" and _sign(found) == words:
                case, verdict, changed = trial, found, True
                break
    return case, verdict


def _sign(verdict: Verdict) -> str:
    return " ".join(verdict.why.split()[:3])
