"""Advice for in-place changes that autograd forbids."""

from __future__ import annotations

_FORBIDDEN = "is a view and is being modified inplace"


def note_in_place(error: BaseException) -> None:
    """Note on an error of the model's forward what to change, if a block changed in place what it was called with."""
    if _FORBIDDEN in str(error):
        error.add_note(
            "A block changes what it is called with in place, and under this spec that is a view of something else: write "
            "x = x + y for x += y, and torch.relu(x) for torch.relu_(x), where x is an argument of the block. What a block has "
            "made itself may be changed in place."
        )
