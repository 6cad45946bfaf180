"""Your own tensor-parallel mode: eight layouts, from which collectives, gradients and costs are derived.

meshfold run --ranks 4 examples/own_mode.py
"""

import copy

import torch

from meshfold.engine import Engine
from meshfold.mesh import Mesh
from meshfold.models import build
from meshfold.tensor_parallel import MODES, Mode, matmul_cost

# Megatron's 1D cuts weights up over ranks that see the same tokens; FSDP over ranks that see others, and gathers them.
# Both at once: tokens (m) over `shard`, heads and the inside of MLPs over `tensor`, weights over the two.
mine = Mode(
    name="1d+fsdp",
    axes=("shard", "tensor"),
    residual="m:shard h",  # the stream between blocks
    column="k:shard n:tensor",  # weights of QKV, up and gate, from k to n; shard is extra here, so it is gathered
    hidden="m:shard n:tensor",  # heads, and the inside of an MLP
    row="k:tensor,shard n",  # weights of out and down; k over both, tensor major
    embedding="v:tensor,shard h",
    ids="m:shard v:tensor",  # who looks up which words of which tokens
    head="k:shard v:tensor",
    logits="m:shard v:tensor",
)

torch.manual_seed(0)
model, ids = build("gpt-tiny").double(), torch.randint(256, (4, 64))
serial = copy.deepcopy(model)  # each rank trains it by itself, to compare
adamw = torch.optim.AdamW(serial.parameters(), lr=1e-2)
parallel = dict(tensor=dict(mode=mine, grid=(2, 2)))
engine = Engine(model, parallel, optimizer=dict(name="adamw", lr=1e-2), precision="fp64")

engine.print(str(mine.plans["column"]))  # print(mine) shows every matmul
for mode, mesh in ((mine, Mesh(dict(shard=2, tensor=2))), (MODES["1d"], Mesh(dict(tensor=4)))):
    cost = matmul_cost(mode.plans["column"], dict(m=4096, k=1024, n=4096), mesh, itemsize=2)
    engine.print(f"{mode.name}: a rank sends {float(cost.bytes) / 2**20:.0f} MiB for such a layer")

held = sum(parameter.numel() for parameter in engine.model.parameters())
engine.print(f"{held:,} of {engine.report.parameters:,} parameters on rank 0 of {engine.mesh}")
for _ in range(3):
    one = serial(ids, labels=ids).loss
    one.backward()
    adamw.step()
    adamw.zero_grad()
    engine.print(f"loss {engine.train_step(ids):.8f}, in one process {one:.8f}")
