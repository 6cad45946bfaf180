"""A mixture of experts trains on eight ranks, each with one expert of every layer, with the losses of one process.

meshfold run --ranks 8 examples/experts.py
"""

import copy

import torch

from meshfold.engine import Engine
from meshfold.experts import find_experts
from meshfold.models import build

torch.manual_seed(0)
model = build("llama-moe-tiny", experts=8, top_k=4, balance=0.01).double()
ids = torch.randint(256, (8, 32))
serial = copy.deepcopy(model)  # each rank trains it by itself, to compare
adamw = torch.optim.AdamW(serial.parameters(), lr=1e-2)
block = find_experts(serial)[0]
routed = []
block.block.router.register_forward_hook(lambda router, tokens, routing: routed.append(routing.index))

# Attention is split over two ranks and copied four times; experts lie on all eight ranks, once.
parallel = dict(data=4, tensor=2, expert=dict(size=8), zero=dict(stage=1))
engine = Engine(model, parallel, optimizer=dict(name="adamw", lr=1e-2), precision="fp64")
engine.print(engine.spec.describe())
for name in block.stacked:
    whole, mine = serial.get_parameter(name).shape, engine.model.get_parameter(name).shape
    engine.print(f"{name}: {tuple(mine)} on a rank, of {tuple(whole)}")
for _ in range(3):
    one = serial(ids, labels=ids).loss  # with the balance loss of the whole batch
    one.backward()
    adamw.step()
    adamw.zero_grad()
    loss = engine.train_step(engine.shard_batch(ids))
    engine.print(f"loss {loss:.8f}, in one process {one:.8f}")
counts = torch.bincount(routed[-1].flatten(), minlength=8)
engine.print("tokens of each expert of the first layer in the last step:", *counts.tolist())
