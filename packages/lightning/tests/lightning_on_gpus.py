"""Trains Lightning's examples, alone or under a spec, in two precisions, and keeps losses and weights.

    meshfold run --ranks N lightning_on_gpus.py OUT.pt ACCELERATOR '{"zero": {"stage": 3}}'

An empty spec is Lightning alone, on one device.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from torch.utils.data import DataLoader

from meshfold.lightning import MeshfoldStrategy

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file
from lightning_cases import DATA, MODULES, QUIET, ROWS, RULES, SEED, Notes, Run, be_quiet, serial

PRECISIONS = ("32-true", "bf16-mixed")


def under(parallel: dict[str, Any], devices: int, kind: str, **options: Any) -> Run:
    """Losses and final weights of an example under a spec."""
    be_quiet()
    seed_everything(SEED, verbose=False)
    strategy = MeshfoldStrategy(parallel, rules=RULES if kind == "transformer" else None)
    notes = Notes()
    trainer = Trainer(devices=devices, strategy=strategy, callbacks=[notes], **{**QUIET, "max_epochs": 2, **options})
    rows = ROWS // (devices // parallel.get("tensor", 1))
    trainer.fit(MODULES[kind](), DataLoader(DATA[kind](), batch_size=rows))
    whole = {name: value.cpu() for name, value in strategy.full_state_dict().items()}
    strategy.close()
    return notes.losses, whole


def main(out: str, accelerator: str, spec: str) -> None:
    """See above."""
    parallel, found = json.loads(spec), {}
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    for kind in MODULES:
        for precision in PRECISIONS:
            options = {"accelerator": accelerator, "precision": precision}
            run = under(parallel, ranks, kind, **options) if parallel else serial(kind, **options)
            found[kind, precision] = run
    if rank == 0:
        torch.save(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
