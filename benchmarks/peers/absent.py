"""A peer that cannot take part on this machine."""

from __future__ import annotations

import importlib
from typing import Any


class AbsentError(Exception):
    """The peer is not installed, or in a version that lacks what is compared. The message says what to install."""


def deepspeed() -> Any:
    """Return DeepSpeed's module.

    Raises:
        AbsentError: without it.
    """
    try:
        return importlib.import_module("deepspeed")
    except ImportError as error:
        raise AbsentError("deepspeed is not installed: pip install deepspeed==0.19.8") from error
