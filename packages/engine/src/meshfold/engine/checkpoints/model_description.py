"""A model's configuration, as a checkpoint keeps it."""

from __future__ import annotations

import json
from typing import Any


def describe_model(model: Any) -> dict[str, Any] | None:
    """Return the configuration of a model; None for a model whose configuration cannot be written.

    A configuration can say it itself, in a method ``checkpoint_description()``; those of transformers are written as JSON.
    """
    config: Any = getattr(model, "config", None)
    if hasattr(config, "checkpoint_description"):
        own: dict[str, Any] = config.checkpoint_description()
        return own
    if hasattr(config, "to_json_string"):
        found = json.loads(config.to_json_string(use_diff=True))
        found["architectures"] = found.get("architectures") or [type(model).__name__]
        return {"kind": "hf", "config": found}
    return None
