"""The sharded matmul against the serial one: y, dx and dw, for every mode, lowering and choice of what is kept."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from meshfold.mesh import LayoutError, Mesh, Placement
from meshfold.mesh.testing import run_on_ranks
from meshfold.tensor_parallel import plan
from meshfold.tensor_parallel.lowerings import LOWERINGS
from meshfold.tensor_parallel.matmul import bind_enter_operand, bind_matmul, lead_shape, matmul
from meshfold.tensor_parallel.modes import MODES
from meshfold.tensor_parallel.plan import MatmulPlan

Axes = tuple[tuple[str, int], ...]
KEEPS = (frozenset[str](), frozenset({"x"}), frozenset({"w"}), frozenset({"x", "w"}))
ROLES = ("column", "row", "embedding", "head", "tied_head")
WAYS = ("gather", "stream", "ring", "push")


@dataclass(frozen=True)
class Case:
    """A plan by its layouts, on a mesh."""

    name: str
    axes: Axes
    x: str
    w: str
    y: str

    @property
    def plan(self) -> MatmulPlan:
        return plan(self.x, self.w, self.y)


def of_mode(mode: str, **axes: int) -> Iterator[Case]:
    for role in ROLES:
        found = MODES[mode].plans[role]
        yield Case(f"{mode} {role}", tuple(axes.items()), str(found.x), str(found.w), str(found.y))


def row(name: str, layouts: str, **axes: int) -> Case:
    x, w, y = layouts.split(" | ")
    return Case(name, tuple(axes.items()), x, w, y)


CASES: dict[int, tuple[Case, ...]] = {
    2: (*of_mode("1d", tensor=2), *of_mode("1d+sequence", tensor=2)),
    4: (
        *of_mode("1d", tensor=4),
        *of_mode("1d+sequence", tensor=4),
        *of_mode("2d", row=2, col=2),
        *of_mode("2.5d", depth=1, row=2, col=2),
        *of_mode("3d", a=2, b=2, c=1),
        *of_mode("2d", row=1, col=4),
        row("fsdp", "m:data k | k n:data | m:data n", data=4),
        row("data × 1d row", "m:data k:tensor | k:tensor n | m:data n", data=2, tensor=2),
        row(
            "fsdp × 1d row + sequence",
            "m:data k:tensor | k:tensor,data n | m:data,tensor n",
            data=2,
            tensor=2,
        ),
        row("scatter along n", "m k:tensor | k:tensor n | m n:tensor", tensor=4),
        row("y in both", "m k:a,b | k:a,b n | m:b n:a", a=2, b=2),
        row("weight in both", "m:a,b k | k:b n:a | m:a,b n", a=2, b=2),
    ),
    8: (
        *of_mode("2d", row=2, col=4),
        *of_mode("2.5d", depth=2, row=2, col=2),
        *of_mode("3d", a=2, b=2, c=2),
        row("2.5d, w also over depth", "m:d,r k:c | k:r,d n:c | m:d,r n:c", d=2, r=2, c=2),
        row("k in the order of no mesh", "m:d,r k:c | k:d,r n:c | m:d,r n:c", r=2, d=2, c=2),
        row("fsdp × 2d", "m:data,r k:c | k:r,data n:c | m:data,r n:c", data=2, r=2, c=2),
        row("stream and scatter", "m:r k:t,c | k:t,r n:c | m:r,t n:c", r=2, t=2, c=2),
    ),
    6: tuple(of_mode("2d", row=2, col=3)),
}
SIZES = (24, 48, 24)


@cache
def mesh_of(axes: Axes) -> Mesh:
    """One mesh a shape in each rank: process groups are dear."""
    return Mesh(dict(axes))


def placements(p: MatmulPlan, sizes: tuple[int, int, int] = SIZES) -> tuple[Placement, Placement, Placement]:
    m, k, n = sizes
    return (
        Placement(shape=(m, k), axes=(p.x[p.m], p.x[p.k])),
        Placement(shape=(n, k), axes=(p.w[p.n], p.w[p.k])),
        Placement(shape=(m, n), axes=(p.y[p.m], p.y[p.n])),
    )


def serial(dtype: torch.dtype, integers: bool = False, sizes: tuple[int, int, int] = SIZES) -> tuple[Tensor, ...]:
    """x, w, dy and from them y, dx, dw, computed in float64."""
    m, k, n = sizes
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        if integers:
            return torch.randint(-2, 3, shape, generator=generator).to(dtype)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    x, w, dy = draw(m, k), draw(n, k), draw(m, n)
    wide = x.double(), w.double(), dy.double()
    return x, w, dy, wide[0] @ wide[1].t(), wide[2] @ wide[1], wide[2].t() @ wide[0]


def run(
    case: Case,
    tensors: tuple[Tensor, ...],
    lowering: str,
    keep: frozenset[str],
    wants: tuple[bool, bool] = (True, True),
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """This rank's y, dx and dw."""
    p, mesh = case.plan, mesh_of(case.axes)
    x, w, dy = (place.shard(full, mesh) for place, full in zip(placements(p), tensors, strict=False))
    x.requires_grad_(wants[0])
    w.requires_grad_(wants[1])
    y = matmul(x, w, p, mesh, lowering=lowering, keep=keep)
    y.backward(dy)
    return y.detach(), x.grad, w.grad


def ways(case: Case) -> tuple[str, ...]:
    return tuple(name for name in WAYS if not LOWERINGS[name].refuses(case.plan))


def distance(case: Case, tensors: tuple[Tensor, ...], found: tuple[Tensor | None, ...]) -> float:
    """The largest difference of y, dx or dw to the serial one, relative to its largest element."""
    mesh = mesh_of(case.axes)
    x_at, w_at, y_at = placements(case.plan)
    worst = 0.0
    for place, full, local in zip((y_at, x_at, w_at), tensors[3:], found, strict=True):
        if local is not None:
            difference = (local.double() - place.shard(full, mesh)).abs().max() / full.abs().max()
            worst = max(worst, difference.item() if not difference.isnan() else math.inf)
    return worst


def check_cases(
    world: int,
    dtype: torch.dtype,
    keeps: tuple[frozenset[str], ...],
    integers: bool,
    only: tuple[str, ...] = (),
) -> dict[str, float]:
    """On a rank: every case of a world size in every lowering; what was done, and how far it was off."""
    tensors = serial(dtype, integers)
    found = {}
    for case in CASES[world]:
        if not only or case.name in only:
            for lowering in ways(case):
                for keep in keeps:
                    what = f"{case.name} {dict(case.axes)} {lowering} keep={sorted(keep)}"
                    found[what] = distance(case, tensors, run(case, tensors, lowering, keep))
    return found


def assert_close(results: list[dict[str, float]], tolerance: float, least: int) -> None:
    assert all(len(result) >= least for result in results)
    off = {
        f"rank {r}: {what}": d for r, result in enumerate(results) for what, d in result.items() if not d <= tolerance
    }
    assert not off, "\n".join(f"{what}: off by {d:.2e}" for what, d in off.items())


@pytest.mark.parametrize(
    ("world", "keeps", "least"),
    [
        (4, KEEPS[::3], 100),
        pytest.param(4, KEEPS, 200, marks=pytest.mark.slow),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((2, KEEPS, 60), (6, KEEPS[:1], 10), (8, KEEPS[:1], 35))
        ),
    ],
)
def test_equals_serial_in_float64(world: int, keeps: tuple[frozenset[str], ...], least: int) -> None:
    assert_close(run_on_ranks(world, check_cases, world, torch.float64, keeps, False), 1e-12, least)


@pytest.mark.few(1)
@pytest.mark.parametrize(("world", "keeps", "least"), [(4, KEEPS[:1], 60), (8, KEEPS[3:], 35)])
def test_equals_serial_in_float32(world: int, keeps: tuple[frozenset[str], ...], least: int) -> None:
    assert_close(run_on_ranks(world, check_cases, world, torch.float32, keeps, False), 1e-5, least)


# One of each kind: what a wrong factor, a rank counted twice or a rounded sum would do shows in every bit.
SOME = (
    "1d+sequence column",
    "1d+sequence row",
    "2d column",
    "2d tied_head",
    "3d column",
    "fsdp × 1d row + sequence",
    "weight in both",
    "y in both",
)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_small_integers_come_out_exactly(dtype: torch.dtype) -> None:
    """Sums of small integers do not round, in whatever order: y, dx and dw have the serial bits (no factor 1/P)."""
    assert_close(run_on_ranks(4, check_cases, 4, dtype, KEEPS[:1], True, SOME), 0.0, len(SOME) * 2)


def half_precision_panels() -> dict[str, float]:
    """Distances to float64 of a long sum in bfloat16, relative to the norm."""
    case = next(c for c in CASES[4] if c.name == "2d column" and dict(c.axes)["col"] == 4)
    sizes = (8, 4096, 8)
    tensors = serial(torch.bfloat16, sizes=sizes)
    x_at, w_at, y_at = placements(case.plan, sizes)
    mesh = mesh_of(case.axes)
    x, w = x_at.shard(tensors[0], mesh), w_at.shard(tensors[1], mesh)
    exact = y_at.shard(tensors[3], mesh)
    found = {}
    for lowering in ways(case):
        y = matmul(x, w, case.plan, mesh, lowering=lowering)
        found[lowering] = ((y.double() - exact).norm() / exact.norm()).item()
    return found


def test_half_precision_rounds_once() -> None:
    """Panels are summed in float32: four of them are as exact as one matmul."""
    for found in run_on_ranks(4, half_precision_panels):
        assert set(found) == {*WAYS} - {"push"}  # its plan scatters along two axes
        assert max(found.values()) <= 1.1 * found["gather"]


def depth_one_against_2d() -> list[bool]:
    tensors = serial(torch.float32)
    same = []
    for flat, deep in zip(of_mode("2d", row=2, col=2), of_mode("2.5d", depth=1, row=2, col=2), strict=True):
        for lowering in ways(flat):
            pair = [run(case, tensors, lowering, frozenset()) for case in (flat, deep)]
            same += [torch.equal(a, b) for a, b in zip(*pair, strict=True) if a is not None and b is not None]
    return same


def test_depth_one_has_the_bits_of_2d() -> None:
    for same in run_on_ranks(4, depth_one_against_2d):
        assert len(same) >= 3 * 5 * 2 and all(same)


def replicas_of_dw() -> list[bool]:
    """Whether the ranks that hold the same block of w have the same bits of dw."""
    case = next(c for c in CASES[8] if c.name == "2.5d column")
    mesh = mesh_of(case.axes)
    same = []
    for lowering in ways(case):
        dw = run(case, serial(torch.float32), lowering, frozenset())[2]
        assert dw is not None
        both = Placement(shape=(2 * dw.shape[0], dw.shape[1]), axes=(("depth",), ())).gather(dw, mesh)
        same.append(torch.equal(*both.chunk(2)))
    return same


def test_replicas_of_a_weight_get_the_same_bits() -> None:
    assert all(all(same) and len(same) == 3 for same in run_on_ranks(8, replicas_of_dw))


def frozen_operands() -> tuple[dict[str, float], list[bool]]:
    tensors = serial(torch.float64)
    off, absent = {}, []
    for case in CASES[4]:
        if case.name in SOME:
            for lowering in ways(case):
                for wants in ((True, False), (False, True)):
                    y, dx, dw = run(case, tensors, lowering, frozenset(), wants)
                    off[f"{case.name} {lowering} {wants}"] = distance(case, tensors, (y, dx, dw))
                    absent.append((dx is None, dw is None) == (not wants[0], not wants[1]))
    return off, absent


def test_a_frozen_weight_or_input_gets_no_gradient_and_disturbs_no_other() -> None:
    results = run_on_ranks(4, frozen_operands)
    assert_close([off for off, _ in results], 1e-12, 30)
    assert all(all(absent) for _, absent in results)


def entered_input() -> dict[str, float]:
    """x gathered once for two matmuls, as in a block with several layers on one input."""
    tensors = serial(torch.float64)
    off = {}
    for case in CASES[4]:
        if not case.name.endswith("column"):
            continue
        p, mesh = case.plan, mesh_of(case.axes)
        x_at, w_at, y_at = placements(p)
        for lowering in WAYS:
            if LOWERINGS[lowering].refuses(p.enter()):
                continue
            x, w, dy = (at.shard(t, mesh) for at, t in zip((x_at, w_at, y_at), tensors, strict=False))
            x.requires_grad_()
            w.requires_grad_()
            whole = bind_enter_operand(p, mesh, "x")(x)
            y = matmul(whole, w, p.enter(), mesh, lowering=lowering) + matmul(whole, w, p.enter(), mesh)
            (y / 2).backward(dy)
            off[f"{case.name} {dict(case.axes)} {lowering}"] = distance(case, tensors, (y.detach() / 2, x.grad, w.grad))
    return off


def test_an_input_gathered_once_for_several() -> None:
    assert_close(run_on_ranks(4, entered_input), 1e-12, 8)


def with_auto() -> dict[str, float]:
    tensors = serial(torch.float64)
    some = [case for case in CASES[4] if case.name in SOME]
    return {case.name: distance(case, tensors, run(case, tensors, "auto", frozenset({"x"}))) for case in some}


def test_auto_is_a_lowering() -> None:
    assert_close(run_on_ranks(4, with_auto), 1e-12, len(SOME))


def gathered_back(shape: tuple[int, ...]) -> tuple[tuple[int, ...], float]:
    """``b s k`` folded into tokens: y has the tokens of its layout, and gathers to the serial y."""
    case = next(c for c in CASES[4] if c.name == "1d+sequence column")
    p, mesh = case.plan, mesh_of(case.axes)
    x, w, _, y_serial, *_ = serial(torch.float64)
    x_at, w_at, y_at = placements(p)
    local = x_at.shard(x, mesh).view(*shape, -1)
    y = matmul(local, w_at.shard(w, mesh), p, mesh)
    whole = y_at.gather(y.reshape(-1, y.shape[-1]), mesh)
    return tuple(y.shape), (whole - y_serial).abs().max().item()


@pytest.mark.parametrize(("shape", "expected"), [((3, 2), (12, 2, 6)), ((1, 6), (4, 6, 6)), ((6,), (24, 6))], ids=str)
def test_the_dims_before_the_last_are_tokens(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    for found, off in run_on_ranks(4, gathered_back, shape):
        assert found == expected and off < 1e-12


@pytest.mark.parametrize(
    ("lead", "rows", "expected"),
    [((), 1, ()), ((6,), 3, (3,)), ((4, 5), 10, (2, 5)), ((1, 6), 24, (4, 6)), ((2, 2, 3), 24, (4, 2, 3))],
)
def test_lead_shape(lead: tuple[int, ...], rows: int, expected: tuple[int, ...]) -> None:
    assert lead_shape(torch.Size(lead), rows) == expected


def test_tokens_that_are_not_whole_sequences_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"3 does not divide by 2.*batch_first=True.*mode '1d'"):
        lead_shape(torch.Size((3, 4)), 6)


@pytest.mark.parametrize(
    ("lowering", "layouts", "fragment"),
    [
        ("stream", ("m k", "k n:t", "m n:t"), "neither x nor w is gathered"),
        ("stream", ("m:t k", "k n:t", "m n:t"), "x is gathered along m"),
        ("stream", ("m:t k", "k n:t", "m:t n"), "w is gathered along n"),
        ("ring", ("m k:t", "k:t n", "m n"), "nothing can be passed round a ring"),
        ("push", ("m k:t", "k:t n", "m n"), "moves something else or nothing"),
        ("rings", ("m k", "k n", "m n"), "Did you mean 'ring'?"),
    ],
)
def test_a_lowering_that_does_not_apply_says_why(lowering: str, layouts: tuple[str, str, str], fragment: str) -> None:
    with pytest.raises(LayoutError, match="lowering") as caught:
        matmul(torch.ones(4, 4), torch.ones(4, 4), plan(*layouts), Mesh({"t": 1}), lowering=lowering)
    assert fragment in str(caught.value)


def test_blocks_of_two_different_matmuls_are_refused_by_stream() -> None:
    with pytest.raises(LayoutError, match="shard both from the same k"):
        matmul(
            torch.ones(4, 4),
            torch.ones(4, 3),
            plan("m:r k:c", "k:r n:c", "m:r n:c"),
            Mesh({}),
            lowering="stream",
        )


def compiled_against_eager() -> dict[str, float]:
    """One graph for forward and one for backward, with the numbers of the serial matmul."""
    tensors = serial(torch.float64)
    found = {}
    for case in CASES[4]:
        if case.name == "2d column" and dict(case.axes) == {"row": 2, "col": 2}:
            p, mesh = case.plan, mesh_of(case.axes)
            for lowering in LOWERINGS:
                if LOWERINGS[lowering].refuses(p):
                    continue
                x, w, dy = (at.shard(t, mesh) for at, t in zip(placements(p), tensors, strict=False))
                x.requires_grad_()
                w.requires_grad_()
                torch.compiler.reset()
                compiled = torch.compile(bind_matmul(p, mesh, lowering=lowering), fullgraph=True, backend="aot_eager")
                y = compiled(x, w)
                y.backward(dy)
                found[lowering] = distance(case, tensors, (y.detach(), x.grad, w.grad))
    return found


@pytest.mark.slow
def test_every_lowering_compiles_to_one_graph() -> None:
    assert_close(run_on_ranks(4, compiled_against_eager), 1e-12, len(LOWERINGS) - 1)
