"""Errors of one rank that are errors of all ranks of a group, so that none waits for another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from meshfold.mesh.collectives.operations import all_gather_object
from meshfold.mesh.errors import SpecError
from meshfold.mesh.group import Group


@contextmanager
def shared_errors(group: Group, device: torch.device) -> Iterator[None]:
    """Context manager: an error of one rank inside of it is an error of all ranks of a group; all enter it.

    Raises:
        SpecError: on ranks without an error of their own, with the words of the first one that has one.
    """
    found: Exception | None = None
    try:
        yield
    except Exception as error:
        found = error
    reasons = all_gather_object("" if found is None else str(found) or type(found).__name__, group, device)
    if found is not None:
        raise found
    if reason := next(filter(None, reasons), ""):
        raise SpecError(reason)
