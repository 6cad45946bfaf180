"""Optimizers of matrices on blocks of tensors: ten steps equal those on whole tensors, to 1e-12 in float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshfold.mesh import Mesh, Part, Placement, record
from meshfold.mesh.parameters import ParameterMeta, blocks_of
from meshfold.mesh.testing import ranks
from meshfold.optimizers import (
    Adafactor,
    AdafactorHF,
    Came,
    GaLoreAdafactor,
    GaLoreAdamW,
    Muon,
    OptimizerSettingError,
    muon,
)

STEPS, GAP = 10, 4
# Split over both dims, with padding; the depth too; queries, keys and values in one, of which ranks share keys and values;
# whole; the same shape split otherwise; a vector; three dims.
PLACEMENTS = (
    Placement(shape=(6, 5), axes=(("row",), ("col",))),
    Placement(shape=(8, 6), axes=(("depth", "row"), ("col",))),
    Placement(shape=(8, 3), axes=(("row", "col"), ()), parts={0: (Part(4), Part(2, 2), Part(2, 2))}),
    Placement(shape=(4, 3), axes=((), ())),
    Placement(shape=(6, 5), axes=((), ("row",))),
    Placement(shape=(7,), axes=(("row", "col"),)),
    Placement(shape=(2, 3, 4), axes=((), ("col",), ("depth",))),
)
MATRICES = sum(len(one.shape) == 2 for one in PLACEMENTS)
# The class, a tolerance, and what a step sends.
CASES: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], float, dict[str, int]]] = {
    "adafactor": (lambda p: Adafactor(p, 0.05, weight_decay=0.1), 1e-12, {"all_reduce": 2}),
    "adafactor_hf": (lambda p: AdafactorHF(p, beta1=0.9, weight_decay=0.1), 1e-12, {"all_reduce": 2}),
    "came": (lambda p: Came(p, 0.05, weight_decay=0.1, clip_threshold=0.5), 1e-12, {"all_reduce": 2}),
    "muon": (lambda p: Muon(p, 0.05, ns_dtype="same"), 1e-10, {"all_to_all": 2}),
    "galore_adamw": (
        lambda p: GaLoreAdamW(p, 0.05, weight_decay=0.1, rank=2, update_proj_gap=GAP),
        1e-10,
        {"all_reduce": 1},
    ),
    "galore_adafactor": (
        lambda p: GaLoreAdafactor(p, 0.05, beta1=0.9, scale_parameter=True, rank=2, update_proj_gap=GAP),
        1e-10,
        {"all_reduce": 2},
    ),
}


def test_a_block_of_one_row_is_refused_where_state_would_look_like_it() -> None:
    Adafactor.check_block((4, 3), (8, 3))
    Adafactor.check_block((8, 1), (8, 1))
    with pytest.raises(
        OptimizerSettingError, match=r"block of shape \(8, 1\) of a tensor of shape \(8, 4\).*adafactor_hf"
    ):
        Adafactor.check_block((8, 1), (8, 4))


def numbers() -> list[list[Tensor]]:
    """First values, then gradients of every step."""
    generator = torch.Generator().manual_seed(3)
    return [
        [torch.randn(one.shape, dtype=torch.float64, generator=generator) for one in PLACEMENTS]
        for _ in range(STEPS + 1)
    ]


def step(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], gradients: list[Tensor]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    optimizer.step()


# One that sums over ranks, the one that sends matrices to owners, and one that does both.
SOME = ("adafactor", "muon", "galore_adamw")


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(SOME, id="some"),
        pytest.param(tuple(name for name in CASES if name not in SOME), marks=pytest.mark.slow, id="others"),
    ],
)
@ranks(8)
def test_steps_on_blocks_are_those_on_whole_tensors(monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]) -> None:
    mesh = Mesh({"depth": 2, "row": 2, "col": 2})
    first, *given = numbers()
    computed = [0]

    def counting(matrices: Tensor, **settings: Any) -> Tensor:
        computed[0] += len(matrices)
        return muon_of_all(matrices, **settings)

    muon_of_all = muon.orthogonalize
    monkeypatch.setattr(muon, "orthogonalize", counting)
    for name in names:
        make, tolerance, sent = CASES[name]
        alone = [nn.Parameter(whole.clone()) for whole in first]
        reference = make(alone)
        mine = [nn.Parameter(at.shard(whole, mesh)) for at, whole in zip(PLACEMENTS, first, strict=True)]
        metas: dict[Tensor, ParameterMeta] = {
            p: ParameterMeta(mesh=mesh, placement=at) for p, at in zip(mine, PLACEMENTS, strict=True)
        }
        optimizer: Any = make(mine)
        optimizer.blocks = blocks_of(metas, mesh, mesh.group(*mesh.names), torch.device("cpu"))
        for number, gradients in enumerate(given):
            step(reference, alone, gradients)
            computed[0] = 0
            blocks = [at.shard(whole, mesh) for at, whole in zip(PLACEMENTS, gradients, strict=True)]
            with record() as log:
                step(optimizer, mine, blocks)
            wanted = dict(sent)
            if (
                "galore" in name and number % GAP == 0
            ):  # an owner also returns the gradient that its projection projects
                wanted |= {"all_to_all": 1, "all_gather": 1}
                if name == "galore_adamw":
                    del wanted["all_reduce"]
            assert Counter(entry.kind for entry in log.entries) == wanted, name
            if name == "muon" and number == 0:
                everywhere = torch.tensor(computed)
                torch.distributed.all_reduce(everywhere)
                assert everywhere.item() == MATRICES  # each by one rank
        for whole, block, at in zip(alone, mine, PLACEMENTS, strict=True):
            expected = at.shard(whole.detach(), mesh)
            torch.testing.assert_close(
                block.detach(), expected, rtol=tolerance, atol=tolerance, msg=f"{name} {at.shape}"
            )
        for p, block in zip(alone, mine, strict=True):
            for key, value in reference.state[p].items():
                own = optimizer.state[block][key]
                if own.shape != block.shape:  # means of rows and columns are those of the whole, on every rank
                    torch.testing.assert_close(own, value, rtol=tolerance, atol=tolerance, msg=f"{name} {key}")
    mesh.close()
