"""The specs that train a model fastest on a machine, found without running them."""

from __future__ import annotations

from meshfold.planner.suggestions.layouts import Candidate, Family, candidates, families
from meshfold.planner.suggestions.outlook import Clock, Outlook
from meshfold.planner.suggestions.search import Option, Rejected, Suggestion, option_of, plan_of, suggest

__all__ = [
    "Candidate",
    "Clock",
    "Family",
    "Option",
    "Outlook",
    "Rejected",
    "Suggestion",
    "candidates",
    "families",
    "option_of",
    "plan_of",
    "suggest",
]
