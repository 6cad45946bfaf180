"""Modules that take the sequence first, or the features in the middle, where rows and features are split over the mesh."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tensor_parallel_checks import (
    Case,
    assert_gradients_equal,
    case,
    gradients,
    mesh_of,
    seeded,
    whole_gradients,
)
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.mesh import LayoutError
from meshfold.mesh.testing import ranks
from meshfold.tensor_parallel import parallelize
from meshfold.tensor_parallel.convert.stream_dims import DimFinder, StreamDims
from meshfold.tensor_parallel.layers.base import BatchShape

WORDS, HIDDEN, LENGTH = 12, 8, 6
CASES: tuple[Case, ...] = (
    case("1d", tensor=4),
    case("1d+sequence", tensor=4),
    case("2d", row=2, col=2),
    case("2d", row=4, col=1),
    case("2d", row=1, col=4),
    case("3d", a=2, b=2, c=1),
    case("3d", a=1, b=2, c=2),
)


class Model(nn.Module):
    """Something between an embedding and a head."""

    length = LENGTH

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, HIDDEN), nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, WORDS)

    def middle(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        y: Tensor = self.head(self.norm(x + self.middle(x)))
        return y


class Attention(Model):
    """Torch's attention as it is by default; keys and values of another length."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.cross = nn.MultiheadAttention(HIDDEN, 4), nn.MultiheadAttention(HIDDEN, 4)

    def middle(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        x = x + self.inner(x, x, x, need_weights=False)[0]
        memory = x[:3]
        return self.cross(x, memory, memory, need_weights=False)[0].transpose(0, 1)


class Encoder(Model):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(HIDDEN, 4, 16, dropout=0.0)

    def middle(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x.transpose(0, 1)).transpose(0, 1)
        return y


class Decoder(Encoder):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerDecoderLayer(HIDDEN, 4, 16, dropout=0.0)

    def middle(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        y: Tensor = self.inner(x, x).transpose(0, 1)
        return y


class Throughout(Encoder):
    """Ids are turned before anything else, so that sequences are what is split."""

    length = 8

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids.t())
        y: Tensor = self.head(self.norm(x + self.inner(x)))
        return y.transpose(0, 1)


class Recurrent(Model):
    """A state comes back, and goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTM(HIDDEN, HIDDEN), nn.GRU(HIDDEN, HIDDEN, batch_first=True)

    def middle(self, x: Tensor) -> Tensor:
        y, (state, _) = self.first(x.transpose(0, 1))
        z, last = self.second(y.transpose(0, 1), state)
        found: Tensor = z + last[-1].unsqueeze(1)
        return found


class OverTokens(Model):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.conv = nn.Linear(LENGTH, LENGTH), nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1)

    def middle(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(self.mix(x.transpose(1, 2))).transpose(1, 2)
        return y


class Bottleneck(Model):
    """What lies between two whole layers has all of its few features, and this rank's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(HIDDEN, 4), nn.Linear(4, HIDDEN)

    def middle(self, x: Tensor) -> Tensor:
        y: Tensor = self.two(torch.tanh(self.one(x)))
        return y


class Mean(nn.Module):
    """Returns one vector a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1) * self.weight


class Pooled(Model):
    def __init__(self) -> None:
        super().__init__()
        self.pool = Mean()

    def middle(self, x: Tensor) -> Tensor:
        y: Tensor = self.pool(x).unsqueeze(1)
        return y


class Projections(nn.Module):
    """Attention of the user's own, over s b h."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (self.num_heads, -1)).permute(1, 2, 0, 3)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).flatten(2)
        found: Tensor = self.out_proj(y)
        return found


class OwnAttention(Model):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Projections()

    def middle(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x.transpose(0, 1)).transpose(0, 1)
        return y


@ranks(4)
def test_attention_over_s_b_h_is_right_in_2d_and_refused_in_3d() -> None:
    serial = seeded(OwnAttention)
    ids = torch.randint(WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(0))
    wanted = serial(ids)
    for mode, axes in CASES:
        model = copy.deepcopy(serial)
        parallelize(model, mesh_of(axes), mode)
        if mode == "3d":
            with pytest.raises(LayoutError, match="the sequence first: in mode '3d' tokens are exchanged"):
                model(ids)
        else:
            torch.testing.assert_close(model(ids), wanted)


MODELS: dict[str, tuple[type[Model], dict[str, str]]] = {
    "attention": (Attention, {}),
    "encoder": (Encoder, {}),
    "encoder kept whole": (Encoder, {"inner": "replicate"}),
    "decoder": (Decoder, {}),
    "sequence first throughout": (Throughout, {}),
    "recurrent": (Recurrent, {"first": "replicate", "second": "replicate"}),
    "over tokens": (OverTokens, {"mix": "replicate", "conv": "replicate"}),
    "bottleneck": (Bottleneck, {"one": "replicate", "two": "replicate"}),
    "pooled": (Pooled, {"pool": "replicate"}),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_the_serial_ones(name: str, turn: int) -> None:
    """Each mode with one of the two batches; the slow half has the other one."""
    compare_on_four(name, turn)


@ranks(4)
def compare_on_four(name: str, turn: int) -> None:
    make, rules = MODELS[name]
    serial = seeded(make)
    turn += list(MODELS).index(name)
    for number, rows in enumerate((4, 8)):
        ids = torch.randint(WORDS, (rows, make.length), generator=torch.Generator().manual_seed(rows))
        serial.zero_grad()
        wanted = F.cross_entropy(serial(ids).flatten(0, 1), ids.flatten())
        wanted.backward()
        for mode, axes in CASES[(number + turn) % 2 :: 2]:
            model, mesh, what = copy.deepcopy(serial), mesh_of(axes), f"{mode} on {axes}, {rows} rows"
            model.zero_grad()
            parallelize(model, mesh, mode, rules=rules)
            loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            assert_gradients_equal({"loss": loss}, {"loss": wanted}, what)
            assert_gradients_equal(whole_gradients(model, mesh), gradients(serial), what)


def finder(module: Callable[[], nn.Module], length: int = 6) -> DimFinder:
    """Of a batch of four rows, two here; eight features, four here."""
    return DimFinder(module(), BatchShape(rows=4, length=length), 8, 2, 2)


def test_dims_are_told_from_shapes() -> None:
    def find(module: Callable[[], nn.Module], *shape: int, length: int = 6) -> tuple[int | None, int | None]:
        dims = finder(module, length).find(torch.empty(shape))
        return dims.rows, dims.columns

    assert find(nn.Identity, 2, 6, 4) == (0, -1)
    assert find(nn.Identity, 6, 2, 4) == (1, -1)
    assert find(nn.Identity, 2, 4, 6) == (0, 1)
    assert find(nn.Identity, 4, 6, 8) == (None, None)  # whole
    assert find(nn.Identity, 2, 3) == (0, None)
    assert find(lambda: nn.LSTM(8, 8), 6, 2, 4) == (1, -1)
    assert find(lambda: nn.LSTM(8, 8), 3, 4, 4) == (0, -1)  # ids came in as s b
    assert find(lambda: nn.LSTM(8, 8, batch_first=True), 2, 2, 4, length=2) == (0, -1)
    assert find(lambda: nn.Linear(8, 3), 2, 6, 4) == (0, -1)
    assert find(lambda: nn.Linear(4, 8), 2, 6, 4) == (0, None)  # few features, all of them
    assert find(lambda: nn.Linear(6, 6), 2, 4, 6) == (0, 1)
    assert find(lambda: nn.Linear(4, 4), 2, 4, 4, length=6) == (0, 1)
    assert find(lambda: nn.Conv2d(8, 8, 1), 2, 4, 5, 5) == (0, 1)
    assert finder(nn.Identity).find(torch.empty(8)) == StreamDims(None, None)


def test_what_no_shape_tells_is_refused() -> None:
    with pytest.raises(LayoutError, match="the shape does not tell which dim is which"):
        finder(lambda: nn.Linear(4, 4), length=4).find(torch.empty(2, 4, 4))
    with pytest.raises(LayoutError, match=r"LSTM takes the sequence first and was given \(2, 6, 4\)"):
        finder(lambda: nn.LSTM(8, 8)).find(torch.empty(2, 6, 4))
