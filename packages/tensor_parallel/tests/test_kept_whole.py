"""Modules that are kept whole between split ones: their order of dims, their gradients, and what lies behind them is known."""

from __future__ import annotations

import copy
from collections.abc import Callable

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

WORDS, HIDDEN = 12, 8
COLUMNS, ROWS, LINE = case("2d", row=1, col=2), case("2d", row=2, col=1), case("1d", tensor=2)


class Model(nn.Module):
    """Something between an embedding and a head."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.embed, self.inner, self.norm = nn.Embedding(WORDS, HIDDEN), inner, nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        y: Tensor = self.head(self.norm(x + self.inner(x)))
        return y


def verdict(
    make: Callable[[], nn.Module],
    layout: Case,
    rules: dict[str, str],
    shapes: tuple[tuple[int, int], ...] = ((4, 6),),
) -> str:
    """``"exact"`` for batches of all shapes, one after another, or the refusal; fails for what is neither."""
    mode, axes = layout
    mesh = mesh_of(axes)
    serial = seeded(make)
    model = copy.deepcopy(serial)
    parallelize(model, mesh, mode, rules=rules)
    for shape in shapes:
        ids = torch.randint(HIDDEN, shape, generator=torch.Generator().manual_seed(3))
        serial.zero_grad()
        model.zero_grad()
        one = F.cross_entropy(serial(ids).flatten(0, 1), ids.flatten())
        one.backward()
        try:
            two = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        except LayoutError as error:
            return str(error)
        two.backward()
        assert_gradients_equal({"loss": two}, {"loss": one}, f"{mode} {shape}")
        assert_gradients_equal(whole_gradients(model, mesh), gradients(serial), f"{mode} {shape}")
    return "exact"


class Behind(nn.Module):
    """Code on what a recurrent layer returned."""

    def __init__(self, code: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.rnn, self.code = nn.LSTM(HIDDEN, HIDDEN, batch_first=True), code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self.rnn(x)[0])


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "halves": lambda x: torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1),
    "softmax": lambda x: x.softmax(-1),
    "first": lambda x: x * x[..., :1],
}


@ranks(2)
def test_code_behind_a_layer_that_is_kept_whole() -> None:
    for name, code in MIXING.items():
        found = verdict(lambda code=code: Model(Behind(code)), COLUMNS, {"inner.rnn": "replicate"})
        assert __file__ in found and "split over col" in found, f"{name}: {found}"
        for layout in (ROWS, LINE):
            found = verdict(lambda code=code: Model(Behind(code)), layout, {"inner.rnn": "replicate"})
            assert found == "exact", f"{name}: {found}"


class Gated(nn.Module):
    """A number a token, from a layer that is kept whole, times pieces of the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(HIDDEN, 1), nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.gate(x).sigmoid() * self.down(self.up(x).tanh())
        return y


class Learned(nn.Module):
    """An activation with a weight, on what a column layer wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(HIDDEN, 16), nn.PReLU(), nn.Linear(16, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.act(self.up(x)))
        return y


@ranks(2)
def test_gradients_that_would_be_parts_are_refused() -> None:
    found = verdict(lambda: Model(Gated()), COLUMNS, {"inner.gate": "replicate"})
    assert "needs a gradient" in found and "differs along col" in found, found
    assert "rules={'inner': 'replicate'}" in found, found
    assert verdict(lambda: Model(Gated()), COLUMNS, {"inner": "replicate"}) == "exact"
    assert verdict(lambda: Model(Gated()), ROWS, {"inner.gate": "replicate"}) == "exact"
    assert verdict(lambda: Model(Gated()), LINE, {"inner.gate": "replicate"}) == "exact"
    found = verdict(lambda: Model(Learned()), LINE, {"inner.act": "replicate"})
    assert "differs along tensor" in found and "rules={'inner': 'replicate'}" in found, found
    assert verdict(lambda: Model(Learned()), COLUMNS, {"inner.act": "replicate"}) == "exact"


class Running(nn.Module):
    """A sum over the tokens so far, of a module that takes the sequence first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(0) * self.scale


class SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Running()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x.transpose(0, 1)).transpose(0, 1)
        return y


@ranks(2)
def test_sequences_as_long_as_the_batch_where_a_module_takes_them_first() -> None:
    for layout in (ROWS, COLUMNS, case("3d", a=2, b=1, c=1)):
        for shapes in (((4, 2), (4, 4)), ((4, 6), (4, 2), (4, 4), (2, 2)), ((4, 4),)):
            assert verdict(lambda: Model(SequenceFirst()), layout, {"inner.inner": "replicate"}, shapes) == "exact", (
                f"{layout} {shapes}"
            )


class Twice(SequenceFirst):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x) + super().forward(x)
        return y


@ranks(2)
def test_a_module_that_takes_rows_here_and_there_is_refused() -> None:
    found = verdict(lambda: Model(Twice()), ROWS, {"inner.inner": "replicate"})
    assert "joins rows along dim 0 or 1, the same in every call" in found, found
    assert verdict(lambda: Model(Twice()), COLUMNS, {"inner.inner": "replicate"}) == "exact"


class Turned(Model):
    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(self.inner(self.embed(ids))).transpose(0, 1)).transpose(0, 1)
        return y


class Headless(Model):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        del self.head

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.inner(self.embed(ids))).transpose(0, 1)


class MLP(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN), between

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.between(self.up(x)))
        return y


@ranks(2)
def test_what_is_gathered_along_rows_has_them_in_front() -> None:
    for make in (Turned, Headless):
        model = lambda make=make: make(nn.Identity())  # noqa: E731
        found = verdict(model, ROWS, {})
        assert "split over row: transpose it, rows first" in found, found
        if make is Turned:
            assert verdict(model, COLUMNS, {}) == "exact"


def swapped(y: Tensor) -> Tensor:
    return y.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def sorted_by_parity(y: Tensor) -> Tensor:
    return y.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


@ranks(2)
def test_pieces_one_behind_the_other_are_no_piece() -> None:
    for layout in (COLUMNS, LINE):
        assert verdict(lambda: Model(MLP(swapped)), layout, {}) == "exact"
        found = verdict(lambda: Model(MLP(sorted_by_parity)), layout, {})
        assert "Linear of [" in found and "whose last dim is split over" in found, found
