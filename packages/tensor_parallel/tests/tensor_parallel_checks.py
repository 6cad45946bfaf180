"""What the numeric tests share: the meshes they run on, and what "equal to the serial model" means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch import Tensor, nn

from meshfold.mesh import Mesh, all_reduce, metadata

Axes = tuple[tuple[str, int], ...]
Case = tuple[str, Axes]


def case(mode: str, **axes: int) -> Case:
    """A mode on a mesh, in a form that travels to the ranks."""
    return mode, tuple(axes.items())


CASES: dict[int, tuple[Case, ...]] = {
    2: (case("1d", tensor=2), case("1d+tokens", tensor=2), case("2d", row=1, col=2)),
    4: (
        case("1d", tensor=4),
        case("1d+sequence", tensor=4),
        case("2d", row=2, col=2),
        case("2.5d", depth=1, row=2, col=2),
        case("3d", a=2, b=2, c=1),
        case("3d", a=1, b=2, c=2),
        case("3d", a=1, b=1, c=4),
        case("1d", data=2, tensor=2),
        case("1d+sequence", data=2, tensor=2),
        case("1d+tokens", tensor=4),
        case("1d+tokens", data=2, tensor=2),
    ),
    8: (
        case("2d", row=2, col=4),
        case("2.5d", depth=2, row=2, col=2),
        case("3d", a=2, b=2, c=2),
        case("3d", a=1, b=2, c=4),
        case("2d", data=2, row=2, col=2),
        case("3d", data=2, a=2, b=2, c=1),
    ),
}
"""Every mode on the numbers of ranks that it is checked on, with an axis of data parallelism in front where there is room."""

WITHOUT_DATA = {world: tuple(c for c in cases if c[1][0][0] != "data") for world, cases in CASES.items()}
COVERING = (CASES[4][0], CASES[4][1], CASES[4][2], CASES[4][5])
"""1d, 1d + sequence, 2d and a 3d grid whose b and c differ from a: what `make test` runs of what all modes share."""


def two_of_them(place: int) -> tuple[Case, Case]:
    """Return two of ``COVERING``, others for the next place: what `make test` runs of one of many models alike."""
    first, second = ((0, 2), (1, 3), (0, 3), (1, 2))[place % 4]
    return COVERING[first], COVERING[second]


# The largest difference: of the largest gradient of the model; of the tensor's own largest, where that exceeds a share
# of the former (OPT's key bias has a gradient of zero).
_TOLERANCE = {torch.float64: (1e-9, 1e-8, 1e-6), torch.float32: (1e-5, 1e-4, 1e-2)}


@cache
def mesh_of(axes: Axes) -> Mesh:
    """One mesh a shape in each rank: process groups are dear."""
    return Mesh(dict(axes))


@cache
def alone() -> Mesh:
    """A mesh of one rank, which every rank is by itself: the serial model with our dropout."""
    return Mesh({"tensor": 1}, rank=0)


def assert_gradients_equal(
    found: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    what: object = "",
    dtype: torch.dtype | None = None,
) -> None:
    """Assert that gradients (or outputs) are those of the serial model, by name.

    Equal in float64: the largest difference is at most 1e-9 of the largest of all, and 1e-8 of the tensor's own largest
    where that exceeds 1e-6 of the largest of all; in float32 1e-5, 1e-4 and 1e-2.
    """
    assert found.keys() == wanted.keys(), f"{what}: {sorted(found.keys() ^ wanted.keys())}"
    found, wanted = ({name: t.detach() for name, t in given.items()} for given in (found, wanted))
    largest = max(float(t.abs().max()) for t in wanted.values())
    assert 0 < largest < float("inf"), f"{what}: the largest is {largest}"
    for name, exact in wanted.items():
        got = found[name]
        assert got.shape == exact.shape, f"{what} {name}: {tuple(got.shape)} instead of {tuple(exact.shape)}"
        of_all, of_own, share = _TOLERANCE[dtype or got.dtype]
        own, off = float(exact.abs().max()), float((got.double() - exact.double()).abs().max())
        assert off <= of_all * largest, f"{what} {name}: off by {off:.3g}, the largest of all is {largest:.3g}"
        if own > share * largest:
            assert off <= of_own * own, f"{what} {name}: off by {off:.3g}, its own largest is {own:.3g}"


def whole_gradients(module: nn.Module, mesh: Mesh, *, data: str = "data") -> dict[str, Tensor]:
    """Every gradient of a sharded module put together, each tensor once, summed over the axis of data parallelism."""
    found = {}
    for name, parameter in module.named_parameters():
        meta = metadata(parameter)
        assert meta is not None, f"{name} carries no metadata"
        assert parameter.grad is not None, f"{name} has no gradient"
        assert parameter.grad.shape == parameter.shape == meta.placement.local_shape(mesh), name
        found[name] = all_reduce(meta.placement.gather(parameter.grad, mesh), mesh.group(data))
    return found


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Every gradient of a serial module, each tensor once."""
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def share_of_data(x: Tensor, mesh: Mesh) -> Tensor:
    """The rows of a tensor that this rank's data coordinate owns."""
    return x.chunk(mesh.size("data"))[mesh.index("data")]


def seeded(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """A module with the same weights on every rank; none of them zero or one, where a mistake would not show."""
    torch.manual_seed(seed)
    module = make().to(dtype)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=dtype))
    return module
