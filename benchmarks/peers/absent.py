"""A peer that cannot take part on this machine."""

from __future__ import annotations


class AbsentError(Exception):
    """The peer is not installed, or in a version that lacks what is compared. The message says what to install."""
