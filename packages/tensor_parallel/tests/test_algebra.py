"""The algebra: every row of the table of modes, every collective derived, every malformed layout refused."""

from __future__ import annotations

import pytest

from meshfold.mesh import LayoutError, Mesh
from meshfold.tensor_parallel import matmul_cost, plan
from meshfold.tensor_parallel.modes import MODES, Mode, find_mode
from meshfold.tensor_parallel.plan import MatmulPlan


def text(p: MatmulPlan, phase: str) -> str:
    """The collectives of a phase in the table's short words."""
    short = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR"}
    moves = [move for move in p.collectives if move.phase == phase]
    return ", ".join(f"{short[m.kind]} {m.operand}{':' + m.dim if m.dim else ''} {'+'.join(m.axes)}" for m in moves)


# name: x | w | y -> forward | dx | dw
TABLE = {
    "1d column": ("m k | k n:t | m n:t", "", "AR dx t", ""),
    "1d row": ("m k:t | k:t n | m n", "AR y t", "", ""),
    "1d column + sequence": ("m:t k | k n:t | m n:t", "AG x:m t", "RS dx:m t", "AG x:m t"),
    "1d row + sequence": ("m k:t | k:t n | m:t n", "RS y:m t", "AG dy:m t", ""),
    "2d": ("m:r k:c | k:r n:c | m:r n:c", "AG x:k c, AG w:k r", "AG w:k r, RS dx:k c", "AG x:k c, RS dw:k r"),
    "2.5d": (
        "m:d,r k:c | k:r n:c | m:d,r n:c",
        "AG x:k c, AG w:k r",
        "AG w:k r, RS dx:k c",
        "AG x:k c, RS dw:k r, AR dw d",
    ),
    "2.5d, w also over d": (
        "m:d,r k:c | k:r,d n:c | m:d,r n:c",
        "AG x:k c, AG w:k d, AG w:k r",
        "AG w:k d, AG w:k r, RS dx:k c",
        "AG x:k c, RS dw:k r, RS dw:k d",
    ),
    "3d odd": (
        "m:a,c k:b | k:b,a n:c | m:a,b n:c",
        "AG x:m c, AG w:k a, RS y:m b",
        "AG dy:m b, AG w:k a, RS dx:m c",
        "AG x:m c, RS dw:k a",
    ),
    "3d even": (
        "m:a,b k:c | k:c,a n:b | m:a,c n:b",
        "AG x:m b, AG w:k a, RS y:m c",
        "AG dy:m c, AG w:k a, RS dx:m b",
        "AG x:m b, RS dw:k a",
    ),
    "fsdp": ("m:dp k | k n:dp | m:dp n", "AG w:n dp", "AG w:n dp", "RS dw:n dp"),
    "data parallel": ("m:dp k | k n | m:dp n", "", "", "AR dw dp"),
    "fsdp × 1d row + sequence": (
        "m:dp k:t | k:t,dp n | m:dp,t n",
        "AG w:k dp, RS y:m t",
        "AG dy:m t, AG w:k dp",
        "RS dw:k dp",
    ),
    "fsdp × 2d": (
        "m:dp,r k:c | k:r,dp n:c | m:dp,r n:c",
        "AG x:k c, AG w:k dp, AG w:k r",
        "AG w:k dp, AG w:k r, RS dx:k c",
        "AG x:k c, RS dw:k r, RS dw:k dp",
    ),
    "tied head 2d": (
        "m:r k:c | k:c n:r | m:r n:c",
        "AG w:n r, RS y:n c",
        "AG dy:n c, AG w:n r",
        "RS dw:n r",
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_row_of_the_table(name: str) -> None:
    layouts, forward, dx, dw = TABLE[name]
    derived = plan(*layouts.split(" | "))
    assert (text(derived, "forward"), text(derived, "dx"), text(derived, "dw")) == (forward, dx, dw)


# The axes of the modes, shortened as in the table above.
SHORT = {"tensor": "t", "row": "r", "col": "c", "depth": "d"}


@pytest.mark.parametrize(
    ("mode", "role", "row"),
    [
        ("1d", "column", "1d column"),
        ("1d", "row", "1d row"),
        ("1d", "head", "1d column"),
        ("1d+sequence", "column", "1d column + sequence"),
        ("1d+sequence", "row", "1d row + sequence"),
        ("2d", "column", "2d"),
        ("2d", "row", "2d"),
        ("2d", "head", "2d"),
        ("2d", "tied_head", "tied head 2d"),
        ("2.5d", "column", "2.5d"),
        ("2.5d", "row", "2.5d"),
        ("3d", "column", "3d odd"),
        ("3d", "row", "3d even"),
        ("3d", "head", "3d odd"),
    ],
)
def test_modes_are_rows_of_the_table(mode: str, role: str, row: str) -> None:
    found = MODES[mode].plans[role]
    layouts, forward, dx, dw = TABLE[row]
    names = {axis: SHORT.get(axis, axis) for axis in MODES[mode].axes}

    def shortened(words: str) -> str:
        for long, short in names.items():
            words = words.replace(long, short)
        return words

    dims = {found.m: "m", found.k: "k", found.n: "n"}
    wanted = [dict(part.partition(":")[::2] for part in layout.split()) for layout in layouts.split(" | ")]
    for layout, want in zip((found.x, found.w, found.y), wanted, strict=True):
        assert {dims[d]: shortened(",".join(axes)) for d, axes in layout.items()} == want
    for phase, want_text in (("forward", forward), ("dx", dx), ("dw", dw)):
        words = shortened(text(found, phase))
        for dim, short in dims.items():
            words = words.replace(f":{dim} ", f":{short} ")
        assert words == want_text


def test_every_mode_has_five_matmuls() -> None:
    assert set(MODES) == {"1d", "1d+sequence", "1d+tokens", "2d", "2.5d", "3d"}
    for mode in MODES.values():
        assert set(mode.plans) == {"column", "row", "embedding", "head", "tied_head"}


def test_a_plan_prints_itself() -> None:
    assert str(plan(x="m:d,r k:c", w="k:r n:c", y="m:d,r n:c")) == (
        "y[m,n] = x[m,k] w[k,n]\n"
        "  at rest   x m:d,r k:c   w k:r n:c   y m:d,r n:c\n"
        "  compute   m over d, r; k over –; n over c\n"
        "  forward   all-gather x along k over c; all-gather w along k over r\n"
        "  dx        all-gather w along k over r; reduce-scatter dx along k over c\n"
        "  dw        all-gather x along k over c; reduce-scatter dw along k over r; all-reduce dw over d"
    )
    assert "forward   no communication" in str(plan("m k", "k n:t", "m n:t"))


def test_names_and_order_of_dims_are_free() -> None:
    derived = plan(x="tokens:t h", w="out:t h", y="tokens out:t")
    assert (derived.m, derived.k, derived.n) == ("tokens", "h", "out")
    assert text(derived, "forward") == "AG x:tokens t"


def test_plans_are_parsed_once() -> None:
    assert plan("m k", "k n:t", "m n:t") is plan("m k", "k n:t", "m n:t")


def test_compute_axes_are_a_prefix_not_a_set() -> None:
    """m of y is split over t first: the tokens that t holds are not those of x's second split."""
    derived = plan(x="m:d,r k:c", w="k:r n:c", y="m:d,r n:c")
    assert derived.compute == {"m": ("d", "r"), "k": (), "n": ("c",)}
    with pytest.raises(LayoutError):
        plan(x="m:d,r k", w="k n", y="m:r,d n")


def test_an_entered_input_is_neither_gathered_nor_summed() -> None:
    """Somebody else gathers x once for several matmuls, and sums dx of all of them once."""
    derived = plan(x="m:t k", w="k n:t", y="m n:t").enter()
    assert derived.extras("x") == () and derived.sums("x") == ()
    assert [text(derived, phase) for phase in ("forward", "dx", "dw")] == ["", "", ""]
    two = plan(x="m:r k:c", w="k:r n:c", y="m:r n:c").enter()
    assert [text(two, phase) for phase in ("forward", "dx", "dw")] == ["AG w:k r", "AG w:k r", "RS dw:k r"]
    assert str(two.x) == "m:r k"


MALFORMED = {
    "three dims": (("m k j", "k n", "m n"), "has 3 dims: a matmul's tensors have two each"),
    "one dim": (("m k", "k", "m n"), "w='k' has 1 dims"),
    "nothing shared": (("m k", "j n", "m n"), "x and w must share one dim (the summed one)"),
    "all the same": (("m k", "k m", "m k"), "is not a matmul"),
    "y is not m n": (("m k", "k n", "m j"), "w and y the third"),
    "outer product": (("m k", "n j", "m n"), "is not a matmul"),
    "axis on two compute dims": (("m:t k", "k n:t", "m:t n:t"), "axis 't' appears twice in layout 'm:t n:t'"),
    "m and k over one axis": (("m:t k:t", "k:t n", "m:t n"), "an axis can split one dim of a tensor, once"),
    "one dim twice over an axis": (("m:t,t k", "k n", "m n"), "appears twice in layout 'm:t,t k'"),
    "x split where nobody computes": (
        ("m k:t", "k n", "m n"),
        "axis 't' splits k of x ('m k:t') but no multiplication",
    ),
    "w split where nobody computes": (("m k", "k n:t", "m n"), "axis 't' splits n of w"),
    "y split where nobody computes": (("m k", "k n", "m:t n"), "axis 't' splits m of y"),
    "orders differ": (
        ("m:a,b k", "k n", "m:b,a n"),
        "or 'a' also splits n in the two tensors that have that",
    ),
    "y scattered over an axis that sums nothing": (("m k:a", "k:a n", "m n:b"), "axis 'b' splits n of y"),
    "k over two axes in other orders": (
        ("m k:a,b", "k:b,a n", "m n"),
        "ranks along it would repeat each other's work",
    ),
    "a dim twice": (("m m", "m n", "m n"), "dim 'm' appears twice in layout 'm m'"),
    "no name": (("m k:", "k n", "m n"), "'' in 'k:' of layout 'm k:' is not a name of a mesh axis"),
    "space after the colon": (("m k: t", "k:t n", "m n"), "without spaces around ':'"),
    "a number": (("m 2", "2 n", "m n"), "is not a name of a dim"),
    "nothing": (("", "k n", "m n"), "an empty layout"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_layouts_are_refused(name: str) -> None:
    layouts, fragment = MALFORMED[name]
    with pytest.raises(LayoutError) as caught:
        plan(*layouts)
    assert fragment in str(caught.value)


SIZES = {"m": 8, "k": 8, "n": 8}


@pytest.mark.parametrize(
    ("sizes", "fragment"),
    [
        ({"m": 8, "k": 8}, "no size for 'n': give one for each of m, k and n"),
        ({**SIZES, "k": 6}, "k = 6 cannot be split over row (4 blocks) as layout w = 'k:row n:col' asks"),
        ({**SIZES, "k": 6}, "use a multiple of 4, such as 4 or 8"),
        ({**SIZES, "n": 3}, "n = 3 cannot be split over col (2 blocks)"),
        ({**SIZES, "m": 2}, "(4 blocks) as layout x = 'm:row k:col' asks: use a multiple of 4, such as 4"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_those_that_do(sizes: dict[str, int], fragment: str) -> None:
    with pytest.raises(LayoutError) as caught:
        matmul_cost(MODES["2d"].plans["column"], sizes, Mesh({"row": 4, "col": 2}))
    assert fragment in str(caught.value)


def test_an_unknown_mode_is_named_with_the_nearest() -> None:
    with pytest.raises(LayoutError, match=r"no tensor-parallel mode '2\.4d'.* Did you mean '2\.5d'\?"):
        find_mode("2.4d")


ROW_2D = dict(
    residual="m:u h:v",
    column="k:u n:v",
    hidden="m:u n:v",
    row="k:u n:v",
    embedding="v:u h:v",
    ids="m v:u",
    head="k:u v:v",
    logits="m:u v:v",
)


def test_a_mode_of_ones_own() -> None:
    mine = Mode(name="mine", axes=("u", "v"), **ROW_2D)
    assert find_mode(mine) is mine
    assert text(mine.plans["column"], "forward") == "AG x:k v, AG w:k u"
    assert "mode 'mine' on axes u, v" in str(mine)


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        (
            {"column": "k:u n:uu"},
            "mode 'mine': column='k:u n:uu' names the axis 'uu', which is not one of its axes u, v.",
        ),
        ({"row": "n:u k:v"}, "mode 'mine': row='n:u k:v' must have the dims 'k n', in this order"),
        (
            {"hidden": "m:u n"},
            "mode 'mine', column: axis 'v' splits k of x ('m:u k:v') but no multiplication",
        ),
        ({"logits": "m v:v"}, "mode 'mine', head: "),
    ],
)
def test_a_mode_that_does_not_fit_names_the_matmul(change: dict[str, str], fragment: str) -> None:
    with pytest.raises(LayoutError) as caught:
        Mode(name="mine", axes=("u", "v"), **{**ROW_2D, **change})
    assert fragment in str(caught.value)
