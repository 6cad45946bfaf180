"""The mesh: coordinates, indices and groups of any axes, and process groups made from them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfold.mesh import LaunchError, LayoutError, Mesh, MeshfoldError, SpecError, all_reduce
from meshfold.mesh.testing import fake_world, ranks

CUBE = Mesh({"data": 2, "row": 2, "col": 3})


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    sizes = draw(st.lists(st.integers(1, 4), min_size=0, max_size=4))
    return Mesh({f"a{i}": size for i, size in enumerate(sizes)})


@st.composite
def meshes_and_axes(draw: st.DrawFn) -> tuple[Mesh, tuple[str, ...]]:
    mesh = draw(meshes())
    return mesh, tuple(draw(st.permutations(mesh.names)))[: draw(st.integers(0, len(mesh.names)))]


def test_the_last_axis_varies_fastest() -> None:
    assert [CUBE.coordinates(rank) for rank in (0, 1, 3, 6)] == [
        {"data": 0, "row": 0, "col": 0},
        {"data": 0, "row": 0, "col": 1},
        {"data": 0, "row": 1, "col": 0},
        {"data": 1, "row": 0, "col": 0},
    ]


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        (("col",), [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]),
        (("row",), [[0, 3], [1, 4], [2, 5], [6, 9], [7, 10], [8, 11]]),
        (("data", "row"), [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]),
        (("row", "data"), [[0, 6, 3, 9], [1, 7, 4, 10], [2, 8, 5, 11]]),
        (("depth",), [[rank] for rank in range(12)]),
        ((), [[rank] for rank in range(12)]),
        (("data", "row", "col"), [list(range(12))]),
    ],
)
def test_groups(axes: tuple[str, ...], expected: list[list[int]]) -> None:
    assert CUBE.groups(*axes) == expected


@given(meshes_and_axes())
def test_groups_are_a_partition_in_the_order_of_the_index(given: tuple[Mesh, tuple[str, ...]]) -> None:
    mesh, axes = given
    groups = mesh.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
    others = [name for name in mesh.names if name not in axes]
    for group in groups:
        assert [mesh.index(*axes, rank=rank) for rank in group] == list(range(mesh.size(*axes)))
        assert len({mesh.index(*others, rank=rank) for rank in group}) == 1


@given(meshes_and_axes())
def test_sizes_and_indices(given: tuple[Mesh, tuple[str, ...]]) -> None:
    mesh, axes = given
    assert mesh.size(*axes) == math.prod(mesh.axes[axis] for axis in axes)
    for rank in range(mesh.world_size):
        assert mesh.index(*mesh.names, rank=rank) == rank
        index = 0
        for axis in axes:
            index = index * mesh.axes[axis] + mesh.coordinates(rank)[axis]
        assert mesh.index(*axes, rank=rank) == index


def test_factors_of_an_axis() -> None:
    mesh = Mesh({"data": 2, "tensor": 4})
    assert (mesh.size("tensor/2"), mesh.size("tensor%2"), mesh.size("tensor/4"), mesh.size("tensor%1")) == (
        2,
        2,
        4,
        1,
    )
    assert [mesh.index("tensor/2", rank=rank) for rank in range(4)] == [0, 0, 1, 1]
    assert [mesh.index("tensor%2", rank=rank) for rank in range(4)] == [0, 1, 0, 1]
    assert mesh.groups("tensor%2") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert mesh.groups("tensor/2") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert mesh.groups("tensor/2", "tensor%2") == mesh.groups("tensor")
    assert [mesh.index("tensor%2", "tensor/2", rank=rank) for rank in range(4)] == [0, 2, 1, 3]
    line = Mesh({"t": 8})
    assert [line.index("t%4/2", rank=rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert line.groups("t%4/2") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert line.groups("t/2", "t%4/2", "t%2") == [list(range(8))]
    assert line.spanned("t%2", "t%4/2", "t/2") == ("t/2", "t%4/2", "t%2")


def test_a_factor_must_divide() -> None:
    with pytest.raises(SpecError, match="'tensor/3': axis 'tensor' has size 4, which 3 does not divide"):
        Mesh({"tensor": 4}).size("tensor/3")
    with pytest.raises(SpecError, match="'tensor%2/4': its factor tensor%2 has size 2, which 4 does not divide"):
        Mesh({"tensor": 4}).size("tensor%2/4")


def test_an_axis_that_is_not_there_has_size_one() -> None:
    assert CUBE.size("depth") == 1 and CUBE.index("depth", rank=7) == 0
    assert CUBE.size("row", "depth", "col") == 6
    assert CUBE.index("row", "depth", "col", rank=11) == CUBE.index("row", "col", rank=11)


def test_spanned_axes_are_in_mesh_order_without_those_of_size_one() -> None:
    mesh = Mesh({"data": 1, "row": 2, "col": 2})
    assert mesh.spanned("col", "depth", "row", "data") == ("row", "col")
    assert Mesh({"t": 4}).spanned("t%2", "t/2") == ("t/2", "t%2")


def test_without_processes_a_mesh_answers_everything_but_group() -> None:
    mesh = Mesh({"row": 2, "col": 2}, rank=3)
    assert mesh.rank == 3 and mesh.coordinates() == {"row": 1, "col": 1} and mesh.index("row", "col") == 3
    assert Mesh({"row": 2}).rank == 0
    with pytest.raises(LaunchError, match=r"no process group is running\. Start the script with 'meshfold run"):
        mesh.group("row")
    alone = mesh.group("depth")
    assert alone.size == 1 and alone.ranks == (3,) and alone.axes == ()


def test_repr() -> None:
    assert repr(CUBE) == "Mesh(data 2 × row 2 × col 3)"
    assert repr(Mesh({})) == "Mesh(one rank)" and Mesh({}).world_size == 1


@pytest.mark.parametrize("size", [0, -1, 2.0, "2", True, None])
def test_a_size_is_a_whole_number_from_one_up(size: object) -> None:
    with pytest.raises(SpecError, match="axis 'row' of the mesh has size"):
        Mesh({"row": size})  # type: ignore[dict-item]


def test_what_a_mesh_is_made_of() -> None:
    with pytest.raises(SpecError, match=r"such as dict\(data=2\)"):
        Mesh([2, 2])  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"rank 4 is outside a mesh of 4 ranks .*: use 0 to 3"):
        Mesh({"row": 4}, rank=4)


def test_require_names_the_nearest_axis() -> None:
    CUBE.require("row", "col/3", what="a plan")
    with pytest.raises(
        LayoutError, match=r"a plan names the axis 'rows', which .* does not have. Did you mean 'row'\?"
    ):
        CUBE.require("rows", what="a plan")


def test_groups_in_a_world_of_512() -> None:
    with fake_world(512, rank=300):
        mesh = Mesh({"depth": 2, "row": 16, "col": 16})
        assert mesh.coordinates() == {"depth": 1, "row": 2, "col": 12}
        group = mesh.group("row")
        assert group.ranks == tuple(256 + 16 * row + 12 for row in range(16)) and group.index == 2
        assert mesh.group("col", "row").ranks == tuple(range(256, 512))
        assert mesh.group("col", "row") == mesh.group("row", "col")
        assert mesh.group("depth", "data").axes == ("depth",)


def test_numbers_say_which_block_each_rank_of_a_group_holds() -> None:
    with fake_world(6, rank=4):
        mesh = Mesh({"row": 2, "col": 3})
        mesh.prepare("col", "row")
        assert mesh.group("col", "row").ranks == (0, 1, 2, 3, 4, 5) and mesh.group("col", "row").index == 4
        assert mesh.numbers("col", "row") == (0, 2, 4, 1, 3, 5) and mesh.index("col", "row") == 3
        assert mesh.numbers("row", "col") == (0, 1, 2, 3, 4, 5)
        assert mesh.numbers("row") == (0, 1) and mesh.numbers("depth") == (0,)


def test_preparing_without_processes_does_nothing() -> None:
    Mesh({"row": 2, "col": 3}).prepare("col", "row")


def test_a_mesh_of_another_size_than_the_world_is_refused() -> None:
    with (
        fake_world(4),
        pytest.raises(SpecError, match=r"has 6 ranks but 4 processes are running: make the product .* 4"),
    ):
        Mesh({"row": 2, "col": 3}).group("row")


def test_a_closed_mesh_has_no_groups_but_still_answers() -> None:
    with fake_world(4):
        mesh = Mesh({"row": 2, "col": 2})
        mesh.group("row")
        mesh.close()
        assert mesh.groups("row") == [[0, 2], [1, 3]]
        with pytest.raises(MeshfoldError, match="is closed: make a new Mesh"):
            mesh.group("row")
        assert mesh.is_closed and mesh.group("depth").size == 1  # who is alone need not communicate
        assert Mesh({"row": 2, "col": 2}).group("row").size == 2


@ranks(4)
def test_several_meshes_live_side_by_side() -> None:
    import torch

    square, line = Mesh({"row": 2, "col": 2}), Mesh({"tensor": 4})
    try:
        one = torch.tensor([float(2**square.rank)])
        totals = {axis: all_reduce(one, square.group(axis)).item() for axis in ("row", "col")}
        row, col = divmod(square.rank, 2)
        assert totals == {"row": 2.0**col + 2.0 ** (2 + col), "col": 2.0 ** (2 * row) + 2.0 ** (2 * row + 1)}
        assert all_reduce(one, line.group("tensor")).item() == 15.0
        square.close()
        minor = all_reduce(one, line.group("tensor%2")).item()
        assert minor == (3.0 if line.rank < 2 else 12.0)
        assert all_reduce(one, line.group("tensor/2")).item() == (5.0 if line.rank % 2 == 0 else 10.0)
    finally:
        square.close()
        line.close()
