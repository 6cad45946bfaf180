"""Code that reads sizes, and pieces of one element: what passes is a piece of the whole in numbers, the rest is refused."""

from __future__ import annotations

import math

import pytest
import torch
from test_tracking import OPERATIONS, Code, assembled, split_at
from torch import Tensor
from torch.nn import functional as F

from meshfold.mesh import LayoutError
from meshfold.mesh.tracking.active import activated
from meshfold.mesh.tracking.dims import Dims, Factor, Split, axes_of, is_whole
from meshfold.mesh.tracking.follow import Tracker
from meshfold.mesh.tracking.local_size import LocalSize
from meshfold.mesh.tracking.sizes import OpenSizes

SIZES: dict[str, Code] = {
    "times": lambda x: x * (2 * x.shape[-1]),
    "times 0": lambda x: x * x.shape[0],
    "mean by hand": lambda x: x.sum(-1) / x.shape[-1],
    "mean of rows": lambda x: x.sum(0) / x.shape[0],
    "mean of tokens": lambda x: x / x.shape[1],
    "of all": lambda x: x / x.numel(),
    "product": lambda x: x / math.prod(x.shape),
    "ones": lambda x: x * torch.ones(x.shape[:2], dtype=x.dtype).sum(),
    "ones kept": lambda x: x * torch.ones(x.shape[:2], dtype=x.dtype)[..., None],
    "new": lambda x: x + x.new_ones(x.shape[1], 1).mean(0),
    "full": lambda x: x * torch.full((x.shape[1], 1), 2.0, dtype=x.dtype),
    "filled": lambda x: x * torch.full((), x.shape[1], dtype=x.dtype),
    "arange": lambda x: x * torch.arange(x.shape[1], dtype=x.dtype)[:, None],
    "arange mean": lambda x: x * torch.arange(x.shape[-1], dtype=x.dtype).mean(),
    "root": lambda x: x / math.sqrt(x.shape[-1]),
    "power": lambda x: x * x.shape[0] ** 0.5,
    "inverse": lambda x: x * (1.0 / x.shape[1]),
    "float in front": lambda x: x * (0.5 * x.shape[0]),
    "float and name": lambda x: floats(x),
    "float and size": lambda x: x * (2.0 - x.size(2)),
    "float and all": lambda x: x * (1.0 / x.numel()),
    "one more": lambda x: x * (x.shape[1] + 1),
    "half": lambda x: x * (x.shape[2] // 2),
    "tensor": lambda x: x * torch.tensor(x.shape[1], dtype=x.dtype),
    "compared": lambda x: x * (torch.full((1,), 9) < x.shape[1]).to(x.dtype),
    "clamped": lambda x: x.clamp(max=x.shape[0] * 0.125),
    "written": lambda x: x.clone().fill_(x.shape[0]),
    "set": lambda x: put(x),
    "expanded": lambda x: x + torch.full((1, 1, 1), 2.0, dtype=x.dtype).expand(x.shape).sum(1, keepdim=True),
    "mask": lambda x: torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril() @ x,
    "count of a mask": lambda x: x * torch.ones(x.shape[0], x.shape[0], dtype=x.dtype).tril().sum(),
}

VIEWS: dict[str, Code] = {
    "rows": lambda x: x.reshape(-1, x.shape[-1]).tanh(),
    "rows named": lambda x: x.reshape(x.shape[0] * x.shape[1], x.shape[2]),
    "columns": lambda x: x.reshape(x.shape[0], -1).tanh(),
    "columns named": lambda x: x.reshape(x.shape[0], x.shape[1] * x.shape[2]),
    "flatten 0": lambda x: x.flatten(0, 1),
    "flatten 1": lambda x: x.flatten(1),
    "there and back": lambda x: x.flatten(0, 1).view(x.shape),
    "columns and back": lambda x: x.flatten(1).view_as(x),
    "turned": lambda x: x.transpose(0, 1).flatten(0, 1),
    "turned columns": lambda x: x.transpose(1, 2).reshape(x.shape[0], -1),
    "turned and back": lambda x: x.transpose(0, 2).reshape(-1, x.shape[0]).view(x.shape[2], x.shape[1], -1),
    "unflatten": lambda x: x.unflatten(-1, (-1, 2)).sum(-1),
    "one more dim": lambda x: x[:, None].expand(-1, 3, -1, -1).flatten(0, 1),
    "heads": lambda x: x.view(x.shape[0], x.shape[1], -1, 2).transpose(1, 2).flatten(0, 1),
    "sum of rows": lambda x: x.flatten(0, 1).sum(0),
    "sum of columns": lambda x: x.flatten(1).sum(1),
    "sum after a turn": lambda x: x.transpose(0, 1).reshape(x.shape[1], -1).sum(1),
}

PRODUCTS: dict[str, Code] = {
    "linear": lambda x: F.linear(x, weight(x.shape[-1])),
    "linear with bias": lambda x: F.linear(x, torch.ones(5, 8, dtype=x.dtype), torch.ones(5, dtype=x.dtype)),
    "matmul": lambda x: x @ torch.ones(8, 3, dtype=x.dtype),
    "of rows": lambda x: torch.ones(2, 4, 4, dtype=x.dtype)[0] @ x.transpose(0, 1),
    "vector": lambda x: x @ torch.ones(8, dtype=x.dtype),
    "vector in front": lambda x: torch.ones(6, dtype=x.dtype) @ x,
    "reversed": lambda x: torch.ones(3, 6, dtype=x.dtype) @ x,
    "gram": lambda x: x @ x.transpose(1, 2),
    "gram of rows": lambda x: x.transpose(0, 1) @ x.permute(1, 2, 0),
    "einsum bst": lambda x: torch.einsum("bsh,bth->bst", x, x),
    "einsum sum": lambda x: torch.einsum("bsh->bs", x),
    "einsum all": lambda x: torch.einsum("bsh,bsh->", x, x),
    "einsum dots": lambda x: torch.einsum("...h,hk->...k", x, torch.ones(8, 2, dtype=x.dtype)),
    "einsum implied": lambda x: torch.einsum("bsh,hk", x, torch.ones(8, 2, dtype=x.dtype)),
    "einsum turned": lambda x: torch.einsum("b s h -> h b s", x),
    "einsum rows": lambda x: torch.einsum("bsh,bh->bs", x, x.mean(1)),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.unsqueeze(1)] * 3, is_causal=True),
    "attention in three": lambda x: F.scaled_dot_product_attention(x, x, x),
    "attention masked": lambda x: F.scaled_dot_product_attention(x, x, x, torch.ones(6, 6, dtype=torch.bool).tril()),
    "heads of one": lambda x: F.scaled_dot_product_attention(*[x.transpose(1, 2).unsqueeze(-1)] * 3),
}

SLICES: dict[str, Code] = {
    "first": lambda x: x + x[:1],
    "first token": lambda x: x + x[:, :1],
    "first features": lambda x: x * x[..., :1],
    "four rows": lambda x: x[:4].sum(1),
    "two rows": lambda x: x[:2].sum(1),
    "six tokens": lambda x: x[:, :6].sum(0),
    "three tokens": lambda x: x[:, :3].sum(0),
    "last tokens": lambda x: x[:, -6:].sum(0),
    "last three": lambda x: x[:, -3:].sum(0),
    "last one": lambda x: x[:, -1:] + 1,
    "features": lambda x: x[..., 0:8].sum(0),
    "half of the features": lambda x: x[..., :4].sum(0),
    "all": lambda x: x[:, : x.shape[1]] + 1,
    "narrow": lambda x: x.narrow(1, 0, 3),
    "split": lambda x: x.split(3, 1)[0],
    "squeezed": lambda x: x.squeeze(0).sum(-1),
    "none": lambda x: x[:, None, :6].sum(1),
}

ROWS, TOKENS, FEATURES = (torch.arange(1.0, 1 + n, dtype=torch.float64) for n in (4, 6, 8))
POSITIONS = TOKENS.view(1, 6, 1)
CUTS: dict[str, Code] = {
    "positions": lambda x: x + POSITIONS[:, : x.shape[1]],
    "positions of a plane": lambda x: x + POSITIONS[0, : x.shape[1]],
    "positions behind none": lambda x: x + TOKENS[None, : x.shape[1], None],
    "features": lambda x: x * FEATURES[: x.shape[2]],
    "features behind dots": lambda x: x * FEATURES.view(1, 8)[..., : x.shape[-1]],
    "rows": lambda x: x + ROWS.view(4, 1, 1)[: x.shape[0]],
    "last": lambda x: x + POSITIONS[:, -x.shape[1] :],
    "narrow": lambda x: x + POSITIONS.narrow(1, 0, x.shape[1]),
    "narrow by name": lambda x: x + FEATURES.narrow(dim=-1, start=0, length=x.shape[2]),
    "split": lambda x: x + POSITIONS.split(x.shape[1], 1)[0],
    "summed": lambda x: x + POSITIONS[:, : x.shape[1]].sum(1, keepdim=True),
    "first of them": lambda x: x + POSITIONS[:, : x.shape[1]][:, 0:1],
    "squeezed": lambda x: x + POSITIONS[:, : x.shape[1]].squeeze(0),
    "places": lambda x: x + POSITIONS[0, torch.arange(x.shape[1])],
    "all but one": lambda x: x + POSITIONS[:, : x.shape[1] - 1].sum(1, keepdim=True),
}
"""Whole tensors cut to as many elements as a piece has."""


def weight(size: int) -> Tensor:
    return torch.ones(3, 8, dtype=torch.float64) if size else torch.empty(0)


def floats(x: Tensor) -> Tensor:
    b, s, h = x.shape
    count = s * h
    return x * (1.0 / b) if count else x


def put(x: Tensor) -> Tensor:
    made = torch.zeros_like(x)
    made[..., 0] = x.shape[1]
    return made


def looked_at(code: Code, x: Tensor, number: int) -> tuple[Tensor, Dims]:
    tracker = Tracker()
    split = Split(("p",))
    tracker.mark(x, tuple((Factor(n, split if i == number else None),) for i, n in enumerate(x.shape)))
    with activated(tracker), OpenSizes(tracker):
        found = code(x)
    return found, tracker.dims(found)


@pytest.mark.parametrize("single", [False, True], ids=["half", "one element"])
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize(
    "table",
    [SIZES, VIEWS, PRODUCTS, SLICES, CUTS, OPERATIONS],
    ids=["sizes", "views", "products", "slices", "cuts", "rest"],
)
def test_what_passes_is_a_piece_of_the_whole(table: dict[str, Code], number: int, single: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn((4, 6, 8), generator=generator, dtype=torch.float64)
    pieces = list(whole.split(1 if single else whole.shape[number] // 2, number))
    passed, refused = 0, dict[str, str]()
    for name, code in table.items():
        try:
            results = [looked_at(code, piece.clone(), number) for piece in pieces]
        except LayoutError as error:
            refused[name] = str(error)
            continue
        wanted, dims = code(whole.clone()), results[0][1]
        at = split_at(dims)
        found = assembled(dims, [piece for piece, _ in results], at)
        if at is None:
            assert all(torch.allclose(piece, wanted) for piece, _ in results), f"{name} along {number}: {dims}"
        assert found.shape == wanted.shape, f"{name} along {number}: {dims}"
        assert torch.allclose(found, wanted), f"{name} along {number}: {dims}"
        passed += 1
    assert passed >= len(table) // 6
    assert {name: text for name, text in refused.items() if "/tests/t" not in text} == {}


RIGHT: dict[str, tuple[Code, tuple[int, ...]]] = {
    **{name: (VIEWS[name], (0, 1, 2)) for name in ("rows", "rows named", "columns", "flatten 0", "flatten 1")},
    "there and back": (VIEWS["there and back"], (0, 1, 2)),
    "columns and back": (VIEWS["columns and back"], (0, 1, 2)),
    "heads": (VIEWS["heads"], (0, 1)),
    "linear": (PRODUCTS["linear"], (0, 1)),
    "matmul": (PRODUCTS["matmul"], (0, 1)),
    "einsum dots": (PRODUCTS["einsum dots"], (0, 1)),
    "einsum bst": (PRODUCTS["einsum bst"], (0,)),
    "attention": (PRODUCTS["attention"], (0,)),
    "ones kept": (SIZES["ones kept"], (0, 1, 2)),
    "all": (SLICES["all"], (0, 1, 2)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_not_refused_for_one_element(name: str) -> None:
    code, numbers = RIGHT[name]
    for number in numbers:
        for size in (1, 2):
            shape = [4, 6, 8]
            shape[number] = size
            looked_at(code, torch.randn(shape, dtype=torch.float64), number)


def test_a_size_remembers_what_it_counts() -> None:
    def sizes(x: Tensor) -> Tensor:
        b, s, h = x.shape
        assert type(b) is type(h) is int and isinstance(s, LocalSize) and s == 6
        assert isinstance(b * s, LocalSize) and axes_of((b * s).dim) == ("p",)
        assert isinstance(s * 2, LocalSize) and isinstance(s + 1, LocalSize) and isinstance(-s, LocalSize)
        assert list(range(s)) == list(range(6)) and s == x.shape[1] and s > 5 and f"{s}" == "6"
        assert all(map(is_whole, ((Factor(b),), (Factor(h),))))
        return x

    looked_at(sizes, torch.randn(4, 6, 8), 1)


def test_an_operation_that_fails_on_a_piece_is_refused_with_its_line() -> None:
    for code in (
        lambda x: x @ torch.ones(16, 3),
        lambda x: x + torch.ones(16),
        lambda x: x.view(4, 6, 16),
        lambda x: torch.einsum("bsh,hk->bsk", x, torch.ones(16, 2)),
        lambda x: F.layer_norm(x, (16,)),
        lambda x: x[..., 12],
    ):
        with pytest.raises(LayoutError, match=r"test_tracking_sizes\.py, line") as caught:
            looked_at(code, torch.randn(4, 6, 8), 2)
        assert caught.value.__cause__ is not None or "sums products" in str(caught.value)
    with pytest.raises(RuntimeError) as plain:  # of what is whole it is the user's own
        looked_at(lambda x: torch.ones(3) + torch.ones(4), torch.randn(4, 6, 8), 2)
    assert not isinstance(plain.value, LayoutError)
