"""JSON from files that somebody else may have written: one kind of error, whatever is wrong with them."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        ValueError: for anything that is no JSON, also for bytes that are no UTF-8 and for values nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def parse_json_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        ValueError: if it is something else.
    """
    found = parse_json(text)
    if not isinstance(found, dict):
        raise ValueError(f"it holds a {type(found).__name__}, not an object")
    return found
