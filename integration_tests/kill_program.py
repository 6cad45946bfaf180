"""``python kill_program.py ORDERS``: trains a small GPT, saves after every step, and writes down what it has done.

It goes on from its checkpoint if there is one. ORDERS are a JSON object: the spec, the last step, and how to save.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from meshfold.engine import Engine
from meshfold.models import GPT, GPTConfig

WATCHDOG_S = 20.0
LOG, CHECKPOINT, EXPORT = "log.jsonl", "checkpoint", "exported"


def gpt() -> GPT:
    """Build the model that is trained."""
    return GPT(GPTConfig(vocab_size=37, hidden=32, layers=2, heads=4, max_positions=16, dropout=0.1))


def rows(step: int) -> torch.Tensor:
    """Return the global batch of a step."""
    return torch.randint(37, (4, 8), generator=torch.Generator().manual_seed(step))


def checksum(folder: Path) -> float:
    """Return a number of the weights in a Hugging Face folder, all of whose files must be there."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found = {name: load_file(folder / name) for name in set(index.values())}
    return sum(float(found[file][name].double().abs().sum()) for name, file in sorted(index.items()))


def main() -> None:
    """Train from the last complete checkpoint to the last step."""
    orders: dict[str, Any] = json.loads(sys.argv[1])
    engine = Engine(gpt, orders["parallel"], optimizer=dict(name="adamw", lr=1e-2), watchdog=WATCHDOG_S)

    def note(what: str) -> None:
        if engine.mesh.rank == 0:
            with Path(LOG).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"what": what, "step": engine.steps, **numbers}) + "\n")

    numbers: dict[str, float] = {}
    if Path(CHECKPOINT).exists() or Path(f".{CHECKPOINT}.old").exists():
        engine.load(CHECKPOINT)
    note("started")
    of_step = 0
    while engine.steps < orders["steps"]:
        numbers = {"loss": engine.train_step(engine.shard_batch(rows(engine.steps)))}
        note("trained")
        if orders["asynchronous"]:
            engine.save(CHECKPOINT, asynchronous=True)  # waits for the one before
            if of_step:
                numbers = {"of": of_step}
                note("saved")
            of_step = engine.steps
            time.sleep(0.05)  # so that what is written behind the training is also done behind it
        else:
            engine.save(CHECKPOINT)
            numbers = {"of": engine.steps}
            note("saved")
        if orders["export"]:
            folder = Path(EXPORT, f"step-{engine.steps}")
            engine.save_hugging_face(folder, shard_bytes=20_000)
            numbers = {"sum": checksum(folder) if engine.mesh.rank == 0 else 0.0}
            note("exported")
    engine.close()


if __name__ == "__main__":
    main()
