"""What tests of the running pipeline share: small models, and the model in one process to compare with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.mesh import Mesh
from meshfold.pipeline import Pipeline

VOCAB, WIDTH, SEQUENCE = 37, 16, 6


class Block(nn.Module):
    """Norms, causal attention without heads, an MLP; linear layers with and without bias."""

    def __init__(self, width: int, p: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(p)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(mask, float("-inf"))
        x = x + self.dropout(self.out(scores.softmax(-1) @ v))
        y: Tensor = x + self.down(torch.tanh(self.up(self.norm2(x))))
        return y


class Model(nn.Module):
    """A decoder with a mask that every block needs, and a head that may share the embedding's table."""

    def __init__(self, layers: int = 8, tie: bool = False, p: float = 0.0) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.dropout = nn.Dropout(p)
        self.layers = nn.ModuleList(Block(WIDTH, p) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        length = input_ids.shape[1]
        places = torch.arange(length, device=input_ids.device)
        x = self.dropout(self.embed(input_ids) + self.positions(places))
        mask = places[:, None] < places
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.head(self.norm(x))
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def model(layers: int = 8, *, tie: bool = False, p: float = 0.0) -> Model:
    """The same on every rank."""
    torch.manual_seed(0)
    return Model(layers, tie, p).double()


def tokens(rows: int, seed: int = 1, length: int = SEQUENCE) -> dict[str, Tensor]:
    """Ids and labels, some of which do not count."""
    ids = torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, 2:4] = labels[-1, 1:3] = -100
    return {"input_ids": ids, "labels": labels}


def loss_of(module: nn.Module, batch: Any) -> Tensor:
    """The loss in one process."""
    output = module(**batch)
    loss: Tensor = output["loss"] if isinstance(output, dict) else output.loss
    return loss


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """By name, each tensor once."""
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def assert_gradients(pipeline: Pipeline, wanted: dict[str, Tensor], what: str, tolerance: float = 1e-9) -> None:
    """Every gradient of this rank's parameters: to 1e-9 of the largest of the model."""
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, parameter in pipeline.named_parameters():
        if name not in wanted:
            assert parameter.grad is None, f"{what}: {name} has a gradient"
            continue
        assert parameter.grad is not None, f"{what}: {name} has no gradient"
        distance = float((parameter.grad - wanted[name]).abs().max())
        assert distance <= tolerance * largest, f"{what}: gradient of {name} is off by {distance / largest:.2g}"


def assert_kept_by_someone(pipeline: Pipeline, names: set[str]) -> None:
    """Together the ranks keep every parameter of the model."""
    from torch import distributed

    found: list[Any] = [None] * pipeline.mesh.world_size
    distributed.all_gather_object(found, [name for name, _ in pipeline.named_parameters()])
    assert set().union(*found) == names


def compare(
    make: Callable[[], nn.Module], batches: list[Any], axes: dict[str, int], what: str, **settings: Any
) -> Pipeline:
    """Train for as many steps as there are batches: loss, gradients, and parameters at the end, against one process."""
    serial, mesh = make(), Mesh(axes)
    pipeline = Pipeline(copy.deepcopy(serial), mesh, **settings)
    assert_kept_by_someone(pipeline, {name for name, _ in serial.named_parameters()})
    one = torch.optim.AdamW(serial.parameters(), lr=1e-2)
    many = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
    for step, batch in enumerate(batches):
        one.zero_grad()
        many.zero_grad()
        wanted = loss_of(serial, batch)
        wanted.backward()
        loss = pipeline.step(batch)
        assert abs(float(loss - wanted)) <= 1e-9 * abs(float(wanted)), f"{what}: loss of step {step}"
        assert_gradients(pipeline, gradients(serial), f"{what}, step {step}")
        one.step()
        many.step()
    trained = dict(serial.named_parameters())
    for name, parameter in pipeline.named_parameters():
        assert torch.allclose(parameter, trained[name], rtol=1e-7, atol=1e-9), f"{what}: {name} after training"
    return pipeline
