"""Kinds of cases that are known to go wrong, each with the defect: left out unless they are asked for.

An entry goes when its defect is mended. An empty list is the aim.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from integration_tests.fuzz.cases import Case

#: What is left out, by the defect.
KNOWN: dict[str, Callable[[Case], bool]] = {}

#: The same, told by what came of a case.
KNOWN_OUTCOMES: dict[str, str] = {}


def outcome(why: str) -> str | None:
    """The known defect that a finding shows; None: none."""
    return next((defect for defect, words in KNOWN_OUTCOMES.items() if re.search(words, why)), None)


def reason(case: Case) -> str | None:
    """The known defect that a case would meet; None: none."""
    return next((defect for defect, holds in KNOWN.items() if holds(case)), None)


def parts(of: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All blocks of a model and all that is in them."""
    for one in (*of.get("blocks", ()), *of.get("parts", ()), *of.get("inner", ())):
        yield one
        yield from parts(one)
