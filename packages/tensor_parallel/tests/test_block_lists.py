"""Mode 1d + sequence splits tokens round lists of blocks: what such a list is, and forwards that do not follow it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tensor_parallel_checks import assert_gradients_equal, gradients, mesh_of, seeded, whole_gradients
from tensor_parallel_models import HIDDEN, Block
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.mesh import LayoutError, Mesh
from meshfold.mesh.testing import ranks
from meshfold.tensor_parallel import parallelize
from meshfold.tensor_parallel.convert.analysis import find_blocks

WORDS = 11
MODE, AXES = "1d+sequence", (("tensor", 2),)


class Model(nn.Module):
    """Blocks in an order of its own between an embedding and a head."""

    def __init__(self, blocks: Callable[[], nn.Module], order: Callable[[nn.Module], list[nn.Module]]) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, HIDDEN), blocks()
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, WORDS)
        self.order = order

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.order(self.blocks):
            x = block(x)
        return self.head(self.norm(x))


class Attributes(nn.Module):
    """Blocks that are no list, each with an MLP in an nn.Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(WORDS, HIDDEN), Block(), Block()
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))
        self.head = nn.Linear(HIDDEN, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.second(self.first(self.embed(ids)))
        return self.head(x + self.mlp(x))


def a_list() -> nn.Module:
    return nn.ModuleList(Block() for _ in range(2))


def a_dict() -> nn.Module:
    return nn.ModuleDict({"a": Block(), "b": Block()})


def twice() -> nn.Module:
    first, second = Block(), Block()
    return nn.ModuleList([first, second, first])


def halves() -> nn.Module:
    """The two linear layers of an MLP in lists of their own."""
    return nn.ModuleList(
        [
            nn.ModuleList([nn.Linear(HIDDEN, 2 * HIDDEN)]),
            nn.ModuleList([nn.Linear(2 * HIDDEN, HIDDEN)]),
        ]
    )


def in_order(blocks: nn.Module) -> list[nn.Module]:
    return list(blocks)  # type: ignore[arg-type]


def by_key(blocks: nn.Module) -> list[nn.Module]:
    return list(blocks.values())  # type: ignore[operator]


def joined(blocks: nn.Module) -> list[nn.Module]:
    return [part for inner in blocks for part in inner]  # type: ignore[attr-defined]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a list": lambda: Model(a_list, in_order),
    "a dict": lambda: Model(a_dict, by_key),
    "attributes": Attributes,
    "a block twice": lambda: Model(twice, in_order),
    "a list called twice": lambda: Model(a_list, lambda blocks: in_order(blocks) * 2),
    "lists of halves": lambda: Model(halves, joined),
}


@ranks(2)
def test_loss_and_gradients_are_the_serial_ones_whatever_holds_the_blocks() -> None:
    mesh = mesh_of(AXES)
    ids = torch.randint(WORDS, (2, 4), generator=torch.Generator().manual_seed(0))
    for name, make in MODELS.items():
        serial = seeded(make)
        model = copy.deepcopy(serial)
        parallelize(model, mesh, MODE)
        losses = []
        for one in (serial, model):
            loss = F.cross_entropy(one(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            losses.append(loss)
        assert_gradients_equal({"loss": losses[1]}, {"loss": losses[0]}, name)
        assert_gradients_equal(whole_gradients(model, mesh), gradients(serial), name)


ORDERS: dict[str, Callable[[nn.Module], list[nn.Module]]] = {
    "backwards": lambda blocks: in_order(blocks)[::-1],
    "without the first": lambda blocks: in_order(blocks)[1:],
    "without the last": lambda blocks: in_order(blocks)[:-1],
}


@ranks(2)
def test_another_order_than_that_of_the_list_is_refused() -> None:
    ids = torch.zeros(2, 4, dtype=torch.int64)
    for name, order in ORDERS.items():
        model = Model(a_list, order)
        parallelize(model, mesh_of(AXES), MODE)
        with pytest.raises(LayoutError, match="call all of them in the order of the list"):
            model(ids)
        model.order = in_order
        assert model(ids).shape == (2, 4, WORDS), name


def test_a_layer_inside_and_outside_of_blocks_is_refused() -> None:
    model = Model(a_list, in_order)
    model.norm = model.get_submodule("blocks.0.ln1")
    with pytest.raises(LayoutError, match="is used inside blocks"):
        parallelize(model, Mesh({"tensor": 2}, rank=0), MODE)
    parallelize(model, Mesh({"tensor": 2}, rank=0), "1d")


def test_lists_of_blocks() -> None:
    found = {}
    for name, make in MODELS.items():
        modules = dict(make().named_modules())
        linears = {name for name, module in modules.items() if isinstance(module, nn.Linear)}
        writes = {name for name in linears if name.endswith(("out_proj", "mlp.2", "down", "1.0"))}
        lists = find_blocks(modules, sorted(linears - writes - {"head"}), sorted(writes))
        found[name] = {blocks.name: list(blocks.members) for blocks in lists}
    assert found == {
        "a list": {"blocks": ["blocks.0", "blocks.1"]},
        "a dict": {},
        "attributes": {},
        "a block twice": {"blocks.0": ["blocks.0"], "blocks.1": ["blocks.1"]},
        "a list called twice": {"blocks": ["blocks.0", "blocks.1"]},
        "lists of halves": {},
    }
