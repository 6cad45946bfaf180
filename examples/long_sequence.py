"""One long sequence over four ranks: each has a quarter of the tokens, and keys and values travel around the ring.

meshfold run --ranks 4 examples/long_sequence.py
"""

import copy

import torch

from meshfold.engine import Engine
from meshfold.mesh import Mesh
from meshfold.models import build
from meshfold.sequence import sequence_sharding, traffic

LENGTH = 1024

torch.manual_seed(0)
model = build("llama-tiny", max_positions=LENGTH).double()
ids = torch.randint(256, (1, LENGTH))
serial = copy.deepcopy(model)  # each rank trains it by itself, to compare
adamw = torch.optim.AdamW(serial.parameters(), lr=1e-2)
parallel = dict(sequence=dict(mode="ring", size=4))
engine = Engine(model, parallel, optimizer=dict(name="adamw", lr=1e-2), precision="fp64")

# A late token sees more than an early one, so each rank gets an early piece and a late one.
sharding = sequence_sharding(LENGTH, Mesh(dict(seq=4)), "ring")
for rank in range(4):
    engine.print(f"rank {rank} has tokens", *(f"{start}–{stop - 1}" for start, stop in sharding.pieces(rank)))

# What an attention sends, for 131,072 tokens, 32 heads of queries and 8 of keys and values, 128 wide, in bfloat16.
for mode in ("ring", "ulysses"):
    sent = sum(traffic(131072, 32, 8, 128, Mesh(dict(seq=4)), mode))
    engine.print(f"{mode}: a rank sends {float(sent) / 2**20:.0f} MiB, forward and backward")

shapes = []
engine.model.blocks[0].register_forward_hook(lambda block, inputs, output: shapes.append(output.shape))
for _ in range(2):
    one = serial(ids, labels=ids).loss
    one.backward()
    adamw.step()
    adamw.zero_grad()
    engine.print(f"loss {engine.train_step(ids):.8f}, in one process {one:.8f}")
engine.print("rank 0's output of the first block:", tuple(shapes[-1]))
