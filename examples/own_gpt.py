"""Your own GPT, in plain torch.nn like nanoGPT, trains on four ranks with the losses of one process.

meshfold run --ranks 4 examples/own_gpt.py
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from meshfold.engine import Engine


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.n_head = heads  # where QKV is one layer, the heads are looked up under such a name
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.c_attn(self.ln_1(x)).unflatten(-1, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, words=64, tokens=32, width=64, heads=4, layers=2):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, width), nn.Embedding(tokens, width)
        self.h = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        return self.lm_head(self.ln_f(self.h(x)))


def loss_fn(logits, ids):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


torch.manual_seed(0)
model, ids = GPT().double(), torch.randint(64, (8, 32))
serial = copy.deepcopy(model)  # each rank trains it by itself, to compare
adamw = torch.optim.AdamW(serial.parameters(), lr=1e-3)
settings = dict(optimizer=dict(name="adamw", lr=1e-3), precision="fp64", loss_fn=loss_fn)
engine = Engine(model, parallel=dict(data=2, tensor=2), **settings)
held = sum(parameter.numel() for parameter in engine.model.parameters())
engine.print(f"{held:,} of {engine.report.parameters:,} parameters on rank 0 of {engine.mesh}")
for _ in range(3):
    one = loss_fn(serial(ids), ids)
    one.backward()
    adamw.step()
    adamw.zero_grad()
    engine.print(f"loss {engine.train_step(engine.shard_batch(ids)):.8f}, in one process {one:.8f}")
