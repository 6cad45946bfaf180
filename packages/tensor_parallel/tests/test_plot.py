"""Pictures show what is so: every disc lies in the block that its rank holds, and groups share a colour."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from meshfold.mesh import Layout, LayoutError, Mesh, MeshfoldError, Placement
from meshfold.tensor_parallel import MODES, draw_matmul, draw_mesh, draw_mode, plan
from meshfold.tensor_parallel.plot.figures import holders, matmul_layout, rank_block

matplotlib = pytest.importorskip("matplotlib", reason="pictures need matplotlib, the extra 'plot'")

MESHES = {
    "1d": dict(tensor=4),
    "1d+sequence": dict(tensor=4),
    "2d": dict(row=2, col=4),
    "2.5d": dict(depth=2, row=2, col=2),
    "3d": dict(a=2, b=1, c=3),
}


def patches(figure, kind):  # type: ignore[no-untyped-def]
    return [p for axes in figure.axes for p in axes.patches if isinstance(p, kind)]


def discs(figure) -> dict[str, tuple[float, float]]:  # type: ignore[no-untyped-def]
    return {p.get_gid(): p.center for p in patches(figure, matplotlib.patches.Circle)}


@pytest.mark.parametrize(("name", "sizes"), MESHES.items())
def test_every_disc_lies_in_the_block_that_its_rank_holds(name: str, sizes: dict[str, int]) -> None:
    mesh, side = Mesh(sizes), 24
    found = discs(draw_mode(name, mesh, matmuls=["column", "row"]))
    corners = {"x": (0.0, 1.42), "w": (1.42, 0.0), "y": (1.42, 1.42)}
    number = torch.arange(side * side).view(side, side)
    for m, matmul in enumerate(("column", "row")):
        for operand, (left, top) in corners.items():
            layout = getattr(MODES[name].plans[matmul], operand)
            place = Placement(shape=(side, side), axes=tuple(layout.values()))
            for rank in range(mesh.world_size):
                x, y = found[f"m{m}-{operand}-{rank}"]
                element = number[int((y - top) * side), int((x - left) * side)]
                assert (place.shard(number, mesh, rank) == element).any(), (matmul, operand, rank)
    assert len(found) == 2 * 3 * mesh.world_size


@pytest.mark.parametrize(("name", "sizes"), MESHES.items())
def test_blocks_fill_the_tensor_once(name: str, sizes: dict[str, int]) -> None:
    mesh = Mesh(sizes)
    for matmul in MODES[name].plans.values():
        for layout in (matmul.x, matmul.w, matmul.y):
            found = holders(layout, mesh)
            assert sum(box.height * box.width for box in found) == 1
            assert sorted(rank for ranks in found.values() for rank in ranks) == list(range(mesh.world_size))


def test_what_a_rank_works_on_contains_what_it_holds() -> None:
    mesh = Mesh(dict(a=2, b=2, c=2))
    for matmul in MODES["3d"].plans.values():
        for operand in ("x", "w", "y"):
            for rank in range(8):
                small, large = (
                    rank_block(getattr(matmul, operand), mesh, rank),
                    rank_block(matmul_layout(matmul, operand), mesh, rank),
                )
                assert large.top <= small.top
                assert small.top + small.height <= large.top + large.height
                assert large.left <= small.left
                assert small.left + small.width <= large.left + large.width


def test_groups_share_a_colour_and_nobody_else_does() -> None:
    mesh = Mesh(dict(data=2, row=2, col=2))
    figure = draw_mesh(mesh, "row", ("row", "col"))
    shades = {p.get_gid(): p.get_facecolor() for p in patches(figure, matplotlib.patches.Circle)}
    for axes in (("row",), ("row", "col")):
        colours = [{shades[f"{'-'.join(axes)}-{rank}"] for rank in ranks} for ranks in mesh.groups(*axes)]
        assert all(len(of_group) == 1 for of_group in colours)
        assert len(set.union(*colours)) == len(colours)


def texts(figure) -> Iterator[str]:  # type: ignore[no-untyped-def]
    for text in (*figure.texts, *(t for axes in figure.axes for t in axes.texts)):
        yield text.get_text()


def test_collectives_are_written_as_the_plan_prints_them_and_those_of_one_rank_are_not() -> None:
    p = plan(x="m:d,r k:c", w="k:r n:c", y="m:d,r n:c")
    words = "\n".join(texts(draw_matmul(p, Mesh(dict(d=2, r=2, c=2)))))
    assert all(str(move) in words for move in p.collectives)
    assert str(Layout.parse("m:d,r k:c")) in words
    without = "\n".join(texts(draw_matmul(p, Mesh(dict(d=1, r=2, c=2)))))
    assert "over d" not in without


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: draw_mesh(Mesh({})), "nothing to draw"),
        (lambda: draw_mesh(Mesh(dict(row=2, col=2)), "rows"), "Did you mean 'row'"),
        (lambda: draw_mode("2d", Mesh(dict(tensor=4))), "'row', which"),
        (lambda: draw_mode("2D", Mesh(dict(row=2, col=2))), "Did you mean '2d'"),
        (lambda: draw_mode("1d", Mesh(dict(tensor=2)), matmuls=["qkv"]), "column, row, embedding"),
        (lambda: draw_matmul(plan(x="m k", w="k n:t", y="m n:t"), Mesh(dict(s=2))), "'t', which"),
    ],
)
def test_what_cannot_be_drawn_is_a_layout_error(draw, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(LayoutError, match=message):
        draw()


def test_too_many_ranks_and_a_rank_that_is_not_there() -> None:
    with pytest.raises(MeshfoldError, match="at most 256"):
        draw_mode("1d", Mesh(dict(tensor=512)))
    with pytest.raises(MeshfoldError, match="use 0 to 3"):
        draw_mode("1d", Mesh(dict(tensor=4)), rank=4)


def test_a_notebook_shows_a_figure() -> None:
    drawn, again = (cast(Any, draw_mesh(Mesh(dict(row=2, col=2)))) for _ in range(2))
    assert drawn._repr_png_().startswith(b"\x89PNG")
    assert drawn._repr_png_() == again._repr_png_()


def test_matplotlib_is_imported_when_something_is_drawn(torch_python: str) -> None:
    code = "import sys; from meshfold.tensor_parallel import draw_mesh; assert 'matplotlib' not in sys.modules"
    subprocess.run([torch_python, "-c", code], check=True)
