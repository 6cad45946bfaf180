"""What the tracker lets pass on a piece is a piece of the whole, in numbers; the rest is refused with the line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.mesh import LayoutError
from meshfold.mesh.tracking import part_of_model, track_forwards, without_tracking
from meshfold.mesh.tracking.active import activated, is_tracking_on
from meshfold.mesh.tracking.dims import UNKNOWN, Dims, Factor, MixesError, Split, block, is_whole, whole, whole_dims
from meshfold.mesh.tracking.follow import Tracker
from meshfold.mesh.tracking.reshaping import regroup

SHAPE = (4, 6, 8)
Code = Callable[[Tensor], Tensor]

OPERATIONS: dict[str, Code] = {
    "x.tanh()": lambda x: x.tanh(),
    "x + 1": lambda x: x + 1,
    "x * x[:1]": lambda x: x * x[:1],
    "x[:, 1:3]": lambda x: x[:, 1:3],
    "x[..., -1]": lambda x: x[..., -1],
    "x[::2]": lambda x: x[::2],
    "transposed": lambda x: x.transpose(1, 2).contiguous(),
    "flat": lambda x: x.reshape(-1, x.shape[-1]),
    "flat columns": lambda x: x.flatten(1),
    "pairs": lambda x: x.unflatten(-1, (-1, 2)).sum(-1),
    "pairs of rows": lambda x: x.unflatten(0, (-1, 2)).mean(1),
    "sum 0": lambda x: x.sum(0),
    "sum 1": lambda x: x.sum(1),
    "mean -1": lambda x: x.mean(-1, keepdim=True),
    "mean": lambda x: x.mean(),
    "amax 1": lambda x: x.amax(1),
    "argmax 0": lambda x: x.argmax(0),
    "softmax 0": lambda x: x.softmax(0),
    "softmax 1": lambda x: x.softmax(1),
    "softmax -1": lambda x: F.softmax(x, -1),
    "cumsum 1": lambda x: x.cumsum(1),
    "flip 1": lambda x: x.flip(1),
    "flip -1": lambda x: x.flip(-1),
    "roll 0": lambda x: x.roll(1, 0),
    "roll all": lambda x: x.roll(1),
    "sort -1": lambda x: x.sort(-1).values,
    "topk 1": lambda x: x.topk(2, 1).values,
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "norm": lambda x: F.normalize(x, dim=1),
    "std": lambda x: x.std(-1),
    "gram": lambda x: x @ x.transpose(1, 2),
    "gram of columns": lambda x: x.transpose(1, 2) @ x,
    "einsum": lambda x: torch.einsum("abc,abc->ab", x, x),
    "outer": lambda x: x.unsqueeze(1) * x.unsqueeze(0),
    "cat -1": lambda x: torch.cat([x, x], -1),
    "cat 0": lambda x: torch.cat([x, x], 0),
    "stack": lambda x: torch.stack([x, -x], 1),
    "chunk": lambda x: x.chunk(2, 1)[1],
    "split": lambda x: x.split(2, -1)[0],
    "unbind": lambda x: x.unbind(1)[2],
    "repeat": lambda x: x.repeat(1, 2, 1),
    "interleave": lambda x: x.repeat_interleave(2, 1),
    "pad": lambda x: F.pad(x, (1, 0)),
    "tril": lambda x: x.tril(),
    "diagonal": lambda x: x.diagonal(dim1=0, dim2=1),
    "gather": lambda x: x.gather(1, torch.zeros(x.shape[0], 1, x.shape[2], dtype=torch.int64)),
    "index": lambda x: x[:, torch.tensor([0, 2])],
    "select": lambda x: x.index_select(2, torch.tensor([1])),
    "glu": lambda x: F.glu(x, -1),
    "pool": lambda x: F.max_pool1d(x, 2),
    "conv": lambda x: F.conv1d(x, torch.ones(3, x.shape[1], 2, dtype=x.dtype)),
    "unfold": lambda x: x.unfold(1, 2, 1),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.unsqueeze(1)] * 3),
    "written": lambda x: torch.zeros(x.shape, dtype=x.dtype).copy_(x).mul_(2),
    "written into": lambda x: written_into(x),
    "fft": lambda x: torch.fft.fft(x, dim=-1).real,
    "cdist": lambda x: torch.cdist(x, x),
    "cross entropy": lambda x: F.cross_entropy(
        x.flatten(0, 1), torch.zeros(x.shape[0] * x.shape[1], dtype=torch.int64)
    ),
    "median": lambda x: x.median(1).values,
    "where": lambda x: torch.where(x > 0, x, x.mean(-1, keepdim=True)),
    "group norm": lambda x: F.group_norm(x, 2),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "threshold": lambda x: F.hardtanh(x).clamp(min=0).pow(2),
    "places": lambda x: x * torch.arange(x.shape[1], dtype=x.dtype)[:, None],
    "movedim": lambda x: x.movedim(-1, 0).flatten(1),
    "squares": lambda x: x.square().sum((0, 1)),
    "count": lambda x: (x > 0).sum(1),
    "var mean": lambda x: torch.var_mean(x, -1)[1],
    "pixel": lambda x: F.pixel_shuffle(x.unsqueeze(0), 2),
    "fold": lambda x: F.unfold(x.unsqueeze(0), 2),
    "logsumexp": lambda x: x.logsumexp(0),
}


def written_into(x: Tensor) -> Tensor:
    out = torch.empty(2, *x.shape, dtype=x.dtype)
    out[0] = x
    out[1] = -x
    return out[1]


def split_at(found: Dims) -> int | None:
    numbers = [number for number, dim in enumerate(found) if not is_whole(dim)]
    return numbers[0] if numbers else None


def assembled(found: Dims, pieces: list[Tensor], number: int | None) -> Tensor:
    if number is None:
        return pieces[0]
    if parts := found[number][0].parts:  # of each a piece
        several = zip(*(piece.split(parts, number) for piece in pieces), strict=True)
        return torch.cat([torch.cat(one, number) for one in several], number)
    before = 1  # elements of the factors of the dim that come before what is split
    for factor in found[number]:
        if factor.split is not None:
            break
        before *= factor.size
    apart = [piece.unflatten(number, (before, -1)) for piece in pieces]
    return torch.cat(apart, number + 1).flatten(number, number + 1)


@pytest.mark.parametrize("split", [Split(("p",)), UNKNOWN], ids=["split", "unknown"])
@pytest.mark.parametrize("number", range(len(SHAPE)))
def test_what_passes_on_pieces_is_the_pieces_of_the_whole(number: int, split: Split) -> None:
    generator = torch.Generator().manual_seed(0)
    pieces = [torch.randn(SHAPE, generator=generator, dtype=torch.float64) for _ in range(2)]
    both = torch.cat(pieces, number)
    passed, refused = 0, []
    for name, code in OPERATIONS.items():
        results, lies = [], []
        try:
            for piece in pieces:
                tracker = Tracker()
                tracker.mark(piece, tuple((Factor(n, split if i == number else None),) for i, n in enumerate(SHAPE)))
                with activated(tracker):
                    results.append(code(piece))
                lies.append(tracker.dims(results[-1]))
        except LayoutError as error:
            refused.append((name, str(error)))
            continue
        wanted, at = code(both), split_at(lies[0])
        passed += 1
        if at is not None and split == UNKNOWN:
            continue  # nothing is said of it
        found = assembled(lies[0], results, at)
        assert found.shape == wanted.shape, f"{name} along {number}: {lies[0]}"
        assert torch.allclose(found, wanted), f"{name} along {number}: {lies[0]}"
    assert passed > 20
    assert [name for name, message in refused if __file__ not in message] == []


RIGHT: dict[str, tuple[int, ...]] = {
    "x.tanh()": (0, 1, 2),
    "softmax -1": (0, 1),
    "layer norm": (0, 1),
    "gram": (0,),
    "attention": (0,),
    "fft": (0, 1),
    "transposed": (0, 1, 2),
    "stack": (0, 1, 2),
    "einsum": (0, 1),
    "written into": (0, 1, 2),
    "conv": (0,),
    "cdist": (0,),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_not_refused(name: str) -> None:
    for number in RIGHT[name]:
        x, tracker = torch.randn(SHAPE), Tracker()
        tracker.mark(x, tuple(block(n, ("p",) if i == number else ()) for i, n in enumerate(SHAPE)))
        code = OPERATIONS[name]
        with activated(tracker):
            code(x.double() if name == "conv" else x)


P, T = Split(("p",)), Split(("t",), "tokens")


def test_views_of_rows_and_heads() -> None:
    rows: Dims = (block(6, ("p",)), whole(8))
    assert regroup(rows, (2, 3, 8)) == ((Factor(2, P),), whole(3), whole(8))
    assert regroup(regroup(rows, (2, 3, 8)), (6, 8)) == rows
    heads: Dims = (whole(2), whole(3), block(8, ("p",), (), 4))
    assert regroup(heads, (2, 3, 2, 4)) == (whole(2), whole(3), (Factor(2, P),), whole(4))
    one: Dims = (whole(2), whole(3), block(4, ("p",), (), 4))
    assert regroup(one, (2, 3, 1, 4)) == (whole(2), whole(3), (Factor(1, P),), whole(4))
    assert regroup(regroup(one, (2, 3, 1, 4)), (2, 3, 4)) == one
    three: Dims = (whole(2), block(24, ("p",), (8, 8, 8), 4))
    assert regroup(three, (2, 3, 2, 4)) == (whole(2), whole(3), (Factor(2, P),), whole(4))
    assert regroup(three, (2, 6, 4)) == (whole(2), (Factor(6, P, (2, 2, 2)),), whole(4))


@pytest.mark.parametrize(
    ("places", "outputs"), [([-2], 1), ([0, 1], 2), ([2, 3], 2), ([0], 0), ([1, 2], 0), ([3, 2], 0)], ids=str
)
def test_indices_of_whole_outputs_of_a_fused_layer_pass(places: list[int], outputs: int) -> None:
    """Two queries, a key and a value on each rank: what counts single queries, or changes an order, is refused."""
    x, tracker = torch.randn(2, 4, 8), Tracker()
    tracker.mark(x, (whole(2), (Factor(4, P, (2, 1, 1), -1),), whole(8)))
    if not outputs:
        with activated(tracker), pytest.raises(LayoutError, match=r"selects elements by position in dim 1"):
            x[:, places]
        return
    with activated(tracker):
        y = x[:, places]
    parts = (1, 1) if places == [2, 3] else ()
    assert tracker.dims(y) == (whole(2), (Factor(outputs, P, parts, -1),), whole(8))


def test_views_of_split_tokens() -> None:
    tokens: Dims = (whole(2), (Factor(6, T),), whole(8))
    flat = regroup(tokens, (12, 8))
    assert flat == ((Factor(2), Factor(6, T)), whole(8))
    assert regroup(flat, (2, 6, 2, 4)) == (whole(2), (Factor(6, T),), whole(2), whole(4))
    with pytest.raises(MixesError, match="split over ranks"):
        regroup(flat, (4, 3, 8))


def test_a_literal_number_of_groups_is_refused_and_an_open_one_is_not() -> None:
    columns: Dims = (whole(3), block(8, ("p",), (), -1))
    assert regroup(columns, (3, 4, 2), inferred=1) == (whole(3), (Factor(4, P),), whole(2))
    with pytest.raises(MixesError, match="write -1 instead of 2"):
        regroup(columns, (3, 2, 4), inferred=2)


def test_what_is_trained_and_the_same_on_every_rank_meets_no_pieces() -> None:
    tracker, x, weight = Tracker(), torch.randn(4, 3), torch.randn(1, 3, requires_grad=True)
    tracker.mark(x, (block(4, ("p",)), whole(3)))
    table = torch.randn(3, requires_grad=True)
    tracker.records.sum_over([table], ("p",))  # who made it sums its gradient over p
    with activated(tracker):
        for code in (
            lambda: x * weight,
            lambda: x @ weight.T,
            lambda: weight.exp().expand(4, 3) + x,
            lambda: table + weight,
        ):
            with pytest.raises(LayoutError, match="differs along p: each rank would get only a part of the gradient"):
                code()
        x * weight.detach() + table.exp()
        with torch.no_grad():
            x * weight


def test_only_what_is_alike_in_every_forward_is_taken_for_a_piece() -> None:
    class Filled(nn.Module):
        def forward(self, x: Tensor, fill: str, batch: Tensor) -> Tensor:
            made = {
                "number": lambda: torch.full((4, 3), 2.0),
                "batch": lambda: (batch > 0).float() * torch.ones(4, 3),
                "places": lambda: torch.arange(4.0)[:, None],
                "chance": lambda: torch.empty(4, 1).bernoulli_(1.0),
                "row": lambda: batch[:1].expand(4, 3),
            }[fill]()
            return x * made

    model = Filled()
    track_forwards(model, Halves())
    for fill in ("number", "row"):
        model(torch.randn(4, 3), fill, torch.ones(4, 3))
    for fill in ("batch", "places", "chance"):
        with pytest.raises(LayoutError, match="combines a shard with a tensor"):
            model(torch.randn(4, 3), fill, torch.ones(4, 3))


def test_a_constant_that_was_expanded_to_the_rows_of_a_rank_multiplies_pieces() -> None:
    """As transformers does with the frequencies of rotary embeddings, where positions differ by row."""

    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("frequencies", torch.arange(3.0)[None, :, None])

        def forward(self, x: Tensor, constant: str, summed: bool = False) -> Tensor:
            made = {
                "expanded": lambda: self.frequencies.expand(4, -1, 1),
                "copied": lambda: self.frequencies.expand(4, -1, 1).contiguous(),
                "other": lambda: torch.arange(12.0).view(4, 3, 1),
            }[constant]()
            found = made @ x
            return found.sum(0) if summed else found

    model, x = Rotary(), torch.randn(4, 1, 5)
    track_forwards(model, Halves())
    for constant in ("expanded", "copied"):
        assert torch.equal(model(x, constant), torch.arange(3.0)[:, None] * x)
        with pytest.raises(LayoutError, match="dim 0, which is split over p"):
            model(x, constant, summed=True)
    with pytest.raises(LayoutError, match="combines a shard with a tensor that is not split in the same way"):
        model(x, "other")


class Halves:
    """A model whose input is split along dim 0."""

    def begin(self, found: Tracker, model: nn.Module, given: Any) -> None:
        found.mark(given["0"], (block(4, ("p",)), *whole_dims(given["0"].shape[1:])))

    def made_later(self, tracker: Tracker, module: nn.Module, given: Tensor, shape: tuple[int, ...]) -> None: ...

    def summed_later(self, tracker: Tracker, module: nn.Module, given: Tensor, layout: Any) -> tuple[str, ...]:
        return ()

    def communicates(self, module: nn.Module) -> bool:
        return False

    def check_arguments(self, *_: Any) -> None:
        raise AssertionError

    def mark_results(self, *_: Any) -> None:
        raise AssertionError

    def remedy(self, name: str, axes: tuple[str, ...]) -> str:
        return f"write it otherwise in {name!r}, over {axes}"


def test_a_watched_model_is_looked_at_once_for_each_kind_of_call() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor, mean: bool = False) -> Tensor:
            return x - x.mean(0) if mean else x.tanh()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor, mean: bool = False) -> Tensor:
            found: Tensor = self.inner(x, mean)
            return found

    model, x = Outer(), torch.randn(4, 3)
    undo = track_forwards(model, Halves())
    seen: list[bool] = []
    model.inner.register_forward_pre_hook(
        lambda *_: seen.append(bool(torch.utils._python_dispatch._len_torch_dispatch_stack()))
    )
    for _ in range(3):
        model(x)
    assert seen == [True, False, False]
    with pytest.raises(
        LayoutError,
        match=r"inner \(Inner\): .*`return x - x\.mean\(0\) if mean.*write it otherwise in 'inner', over \('p',\)",
    ):
        model(x, mean=True)
    model(x)
    assert seen[-1] is False
    undo()
    assert not model._forward_pre_hooks
    model(x, mean=True)


def test_an_exception_of_the_models_own_ends_the_looking() -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("mine")

    model = Failing()
    track_forwards(model, Halves())
    for _ in range(2):
        with pytest.raises(ValueError, match="mine"):
            model(torch.randn(4, 3))
    assert not torch.utils._python_dispatch._len_torch_dispatch_stack()


def test_a_part_of_an_unwatched_forward_is_not_watched() -> None:
    with without_tracking():
        with part_of_model("stage 0"):
            assert not is_tracking_on()
        assert not is_tracking_on()
    with part_of_model("stage 0"):
        assert is_tracking_on()
