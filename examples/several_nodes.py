"""Two nodes of two ranks: tensor inside a node, data between nodes; a restart resumes from the last checkpoint.

bash examples/several_nodes.sh
"""

import sys
from pathlib import Path

import torch

from meshfold.engine import Engine
from meshfold.mesh import Environment
from meshfold.models import build

checkpoint = Path(sys.argv[1]) / "checkpoint"  # all nodes see it

# Ranks are numbered node by node, and the last axis of the mesh varies fastest. Tensor axes talk in every layer, so they take
# the ranks of a node. `data` is what is left; it shrinks when a node is lost and the others go on (NODES=2:4).
here = Environment.detect()  # torchrun's variables, or Slurm's
parallel = dict(tensor=here.local_world_size)
engine = Engine(lambda: build("gpt-tiny"), parallel, optimizer=dict(name="adamw", lr=3e-3), precision="fp64")
engine.print(f"{engine.mesh}, ranks on a node: {here.local_world_size}")
engine.print("ranks that share layers:", engine.mesh.groups("tensor"))
engine.print("ranks that sum gradients:", engine.mesh.groups("data"))

rows = torch.randint(8, (4, 8, 32), generator=torch.Generator().manual_seed(0))  # four batches
if checkpoint.exists():  # when the agents have started all ranks anew, or somebody has started the job again
    engine.load(checkpoint)
    engine.print(f"resuming from step {engine.steps}")
for batch in rows[engine.steps :]:
    loss = engine.train_step(engine.shard_batch(batch))
    engine.save(checkpoint)
    engine.print(f"step {engine.steps}  loss {loss:.8f}")
