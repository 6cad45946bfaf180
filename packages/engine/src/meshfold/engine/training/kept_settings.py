"""What a folder remembers of the run in it, so that ``--resume`` need not be told again and can see what is new."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshfold.engine.training.settings import TrainSettings
from meshfold.engine.whole_file import write_whole
from meshfold.mesh import SpecError

FILE = "settings.json"
KEPT = (
    "steps",
    "batch_size",
    "seq_len",
    "accumulate",
    "optimizer",
    "lr",
    "warmup",
    "schedule",
    "weight_decay",
    "clip",
    "seed",
    "keep",
)
# The place in the data is a number of batches, in an order that the seed makes: with others it would be another place.
_FIXED = ("batch_size", "seq_len", "seed")


def keep(settings: TrainSettings) -> None:
    """Write down the optimization settings of a run; rank 0 calls."""
    path = Path(settings.out) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({name: getattr(settings, name) for name in KEPT}, indent=1)
    write_whole(path, lambda part: part.write_text(text))


def kept(out: str) -> dict[str, Any]:
    """What was written down; nothing where nothing was, or where it cannot be read."""
    try:
        found = json.loads((Path(out) / FILE).read_text())
    except (OSError, ValueError):
        return {}
    return {name: found[name] for name in KEPT if name in found} if isinstance(found, dict) else {}


def what_is_new(settings: TrainSettings, before: Mapping[str, Any]) -> list[str]:
    """A sentence for each setting that changes where a run goes on.

    Raises:
        SpecError: for one that must not.
    """
    said = []
    for name, was in before.items():
        now, option = getattr(settings, name), "--" + name.replace("_", "-")
        if now == was:
            continue
        if name in _FIXED:
            raise SpecError(
                f"{option} {now}: the run in {settings.out!r} has {option} {was}, and goes on in the order of its data: "
                f"leave {option} out, or start anew in another --out"
            )
        said.append(f"{option} is {now} from here on; it was {was}")
    return said
