"""Changes to checkpoints that their index agrees with: what a test needs to get past the checksums."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshfold.checkpoint.state import file_checksum, with_checksum


def edit_state(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what ``state.json`` says, list the files as they are now, and seal it."""
    path = folder / "state.json"
    state = json.loads(path.read_text())
    for name in state["files"]:
        if (folder / name).is_file():
            state["files"][name] = (folder / name).stat().st_size
            state["sums"][name] = file_checksum(folder / name)
    change(state)
    path.write_text(json.dumps(with_checksum(state)))


def relist(folder: Path) -> None:
    """List the files as they are now."""
    edit_state(folder, lambda state: None)
