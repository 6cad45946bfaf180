"""A checkpoint written under one spec resumes under another, with the same losses.

meshfold run --ranks 4 examples/other_spec.py $(mktemp -d)
"""

import sys
from pathlib import Path

import torch

from meshfold.engine import Engine
from meshfold.models import build

checkpoint = Path(sys.argv[1]) / "checkpoint"
rows = torch.randint(8, (6, 8, 32), generator=torch.Generator().manual_seed(0))  # six batches
settings = dict(optimizer=dict(name="adamw", lr=3e-3), clip_grad_norm=1.0, precision="fp64")


def steps(engine, batches):
    return " ".join(f"{engine.train_step(engine.shard_batch(batch)):.8f}" for batch in batches)


# A function in place of a module: no rank ever holds the whole model.
with Engine(lambda: build("gpt-tiny"), dict(tensor=dict(mode="2d", size=4)), **settings) as engine:
    engine.print("2d tensor parallel:", steps(engine, rows[:3]))
    engine.save(checkpoint)
    engine.print("... and on:", steps(engine, rows[3:]))

for parallel in (
    dict(data=2, pipeline=dict(size=2, schedule="zb-h1", microbatches=2)),
    dict(tensor=2, zero=dict(stage=3)),
):
    with Engine(lambda: build("gpt-tiny"), parallel, **settings) as engine:
        engine.load(checkpoint)
        engine.print(f"{engine.mesh} from step {engine.steps} on:", steps(engine, rows[engine.steps :]))
