"""Adafactor and CAME over lists of tensors: Triton against the reference in float64, and what is refused.

Without a GPU ``test_triton_interpreter.py`` runs this file in Triton's interpreter.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

import meshfold.kernels as K

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON = INTERPRETED or torch.cuda.is_available()
DEVICE = "cuda" if TRITON and not INTERPRETED else "cpu"
SHAPES = [((5, 7), (70, 130), (3, 20, 6), (1, 1)), ((64, 128), (2, 16, 32), (80, 16))]  # odd, and multiples of 16
needs_triton = pytest.mark.skipif(not TRITON, reason="no GPU; test_triton_interpreter.py runs this in the interpreter")


def lists(shapes: tuple[tuple[int, ...], ...]) -> dict[str, list[Tensor]]:
    """Lists in float64, by name."""
    generator = torch.Generator().manual_seed(1)

    def normal(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    rows, columns = [one[:-1] for one in shapes], [(*one[:-2], one[-1]) for one in shapes]
    made = {name: [normal(one) for one in shapes] for name in ("parameters", "gradients", "means")}
    for name, sizes in (("rows", rows), ("columns", columns), ("residual_rows", rows), ("residual_columns", columns)):
        made[name] = [normal(one).square() + 0.1 for one in sizes]
    return made


def both(shapes: tuple[tuple[int, ...], ...], run: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return what a function of lists makes by Triton in float32, and by the reference in float64."""
    exact = lists(shapes)
    given = {name: [one.to(DEVICE, torch.float32) for one in some] for name, some in exact.items()}
    with K.use("triton"):
        found = run(**given)
    with K.use("reference"):
        return found, run(**exact)


def near(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted)
    for one, exact in zip(found, wanted, strict=True):
        scale = float(exact.abs().max())
        rounding = {torch.bfloat16: 2.0**-7}.get(one.dtype, 5e-6)
        torch.testing.assert_close(one.cpu().double(), exact.double(), rtol=rounding, atol=5e-6 * scale)


@needs_triton
@pytest.mark.parametrize("shapes", SHAPES, ids=["odd", "even"])
def test_sums_limits_and_distances(shapes: tuple[tuple[int, ...], ...]) -> None:
    def sums(gradients: Any, **_: Any) -> list[Tensor]:
        rows, columns = K.square_sum_lists(gradients)
        return [*rows, *columns]

    near(*both(shapes, sums))
    for floor in (0.0, 0.7):

        def limits(gradients: Any, rows: Any, columns: Any, floor: float = floor, **_: Any) -> list[Tensor]:
            return [K.factored_limit_lists(gradients, rows, columns, floor=floor, clip_threshold=0.5)]

        found, wanted = both(shapes, limits)
        near(found, wanted)
        assert (wanted[0] < 1).any()
    for threshold in (0.5, 1e3):  # some updates are limited, none is

        def distances(
            gradients: Any, means: Any, rows: Any, columns: Any, at: float = threshold, **_: Any
        ) -> list[Tensor]:
            limited, of_rows, of_columns = K.came_distance_lists(gradients, means, rows, columns, clip_threshold=at)
            return [limited, *of_rows, *of_columns]

        near(*both(shapes, distances))


@needs_triton
@pytest.mark.parametrize("kind", ["adafactor", "with means", "came"])
@pytest.mark.parametrize("shapes", SHAPES, ids=["odd", "even"])
def test_steps(shapes: tuple[tuple[int, ...], ...], kind: str) -> None:
    def step(parameters: Any, gradients: Any, rows: Any, columns: Any, means: Any, **others: Any) -> list[Tensor]:
        numbers = [torch.linspace(low, 1, len(parameters), device=parameters[0].device) for low in (0.2, 0.1, 0.3)]
        copies = [torch.full_like(one, 7, dtype=torch.bfloat16) for one in parameters]
        settings: dict[str, Any] = dict(floor=0.3 if kind == "adafactor" else 0.0)
        if kind != "adafactor":
            settings |= dict(means=means, beta1=0.8)
        if kind == "came":
            settings["confidence"] = others["residual_rows"], others["residual_columns"]
        K.factored_apply_lists(parameters, gradients, rows, columns, copies, *numbers, **settings)
        return [*parameters, *means, *copies]

    near(*both(shapes, step))


@pytest.mark.skipif(INTERPRETED, reason="has no kernel of Triton: runs where this process was started")
def test_the_reference_is_adafactor_of_torch() -> None:
    """Its estimate with the floor, and the limit of the update's root mean square."""
    given = lists(((6, 5),))
    [p], [g] = given["parameters"], given["gradients"]
    parameter = torch.nn.Parameter(p.clone())
    parameter.grad = g.clone()
    torch.optim.Adafactor([parameter], lr=0.1, d=1.0, eps=(1e-3, 1e-3)).step()
    rows, columns = K.square_sum_lists([g])
    rows, columns = [rows[0] / 5], [columns[0] / 6]
    limited = K.factored_limit_lists([g], rows, columns, floor=1e-6, clip_threshold=1.0)
    rate = 0.1 * p.square().mean().sqrt().view(1)
    K.factored_apply_lists([p], [g], rows, columns, None, limited, rate, torch.zeros(1), floor=1e-6)
    torch.testing.assert_close(p, parameter.detach(), rtol=1e-12, atol=1e-13)


def test_what_cannot_be_stepped_is_refused() -> None:
    given = lists(((4, 3), (2, 2)))
    g = given["gradients"]
    with pytest.raises(ValueError, match="one tensor for each parameter"):
        K.factored_limit_lists(g, given["rows"][:1], given["columns"], floor=0.0, clip_threshold=1.0)
    with pytest.raises(ValueError, match="contiguous"):
        K.square_sum_lists([g[0].t(), g[1]])
    with pytest.raises(TypeError, match="one dtype"):
        K.came_distance_lists(
            g, [m.float() for m in given["means"]], given["rows"], given["columns"], clip_threshold=1.0
        )
    with pytest.raises(TypeError, match="convert them first"):
        K.square_sum_lists([one.half() for one in g])
