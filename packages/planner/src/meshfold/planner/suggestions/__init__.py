"""The specs that train a model fastest on a machine, found without running them."""

from __future__ import annotations

from meshfold.planner.suggestions.explain import explained
from meshfold.planner.suggestions.here import choice_words, local_machine, suggest_here
from meshfold.planner.suggestions.layouts import Candidate, Family, candidates, families
from meshfold.planner.suggestions.options import Option, Rejected, Suggestion, option_of, plan_of
from meshfold.planner.suggestions.outlook import Outlook, outlook_of
from meshfold.planner.suggestions.part_clock import Clock
from meshfold.planner.suggestions.search import suggest
from meshfold.planner.suggestions.text import (
    breakdown,
    draw_suggestion,
    line_to_paste,
    losers_table,
    pareto_front,
    suggestion_numbers,
    suggestion_table,
)

__all__ = [
    "Candidate",
    "Clock",
    "Family",
    "Option",
    "Outlook",
    "Rejected",
    "Suggestion",
    "breakdown",
    "candidates",
    "choice_words",
    "draw_suggestion",
    "explained",
    "families",
    "line_to_paste",
    "local_machine",
    "losers_table",
    "option_of",
    "outlook_of",
    "pareto_front",
    "plan_of",
    "suggest",
    "suggest_here",
    "suggestion_numbers",
    "suggestion_table",
]
