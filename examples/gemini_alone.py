"""ZeRO stage 3 in your own loop: meshfold-zero-gemini without the engine, with state in host memory.

meshfold run --ranks 2 examples/gemini_alone.py
"""

import torch
from torch import nn
from torch.nn.functional import mse_loss

from meshfold.mesh import Mesh, ParameterMeta, Placement, all_reduce, annotate, start
from meshfold.zero_gemini import Gemini, Memory, Shares


def make():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


process = start()  # NCCL with a GPU for each rank, else gloo
mesh = Mesh(dict(data=process.world_size))
data = mesh.group("data")

model = make()
for parameter in model.parameters():  # the same on all ranks of `data`, over which its gradient is summed
    place = Placement(shape=tuple(parameter.shape), axes=((),) * parameter.dim())
    annotate(parameter, ParameterMeta(mesh=mesh, placement=place, sum_axes=("data",)))
memory = Memory(process.device)
placements = Shares(host_optimizer=0.5, host_parameters=0.25)  # the rest stays where the model computes
gemini = Gemini(model, mesh, stage=3, memory=memory, placements=placements, make_optimizer=adamw, chunk_elems=64 * 65)

serial = make().to(process.device)  # each rank trains it by itself, with plain AdamW, to compare
plain = adamw(serial.parameters())

x, y = torch.randn(2, 16, 64, device=process.device)
mine = slice(process.rank, None, process.world_size)  # this rank's rows
for _ in range(3):
    gemini.begin(last=True)  # last=False before a micro-step that is not the last
    loss = mse_loss(model(x[mine]), y[mine]) / process.world_size  # gradients are summed over the ranks
    loss.backward()
    norm = gemini.clip(1.0)  # of the whole model's gradient
    gemini.step()

    one = mse_loss(serial(x), y)
    one.backward()
    nn.utils.clip_grad_norm_(serial.parameters(), 1.0)
    plain.step()
    plain.zero_grad()
    total = all_reduce(loss.detach(), data)
    if process.rank == 0:
        print(f"loss {total:.5f}  norm {norm:.4f}, in one process with AdamW {one:.5f}")

if process.rank == 0:
    for chunk, placement in gemini.placements.items():
        print(f"{chunk.spec.names[0]} and on: parameters: {placement.parameters}, state: {placement.state}")
