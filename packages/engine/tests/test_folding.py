"""The entry ``axial`` in an engine: a folding model trains as on one process, with data, ZeRO, pipeline and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshfold.engine import Engine
from meshfold.folding import EvoformerStack
from meshfold.mesh import ParallelSpec, SpecError
from meshfold.mesh.testing import fake_world, run_on_ranks

ROWS, SEQUENCES, RESIDUES, C = 4, 5, 7, 8


class Fold(nn.Module):
    """Embeddings, a trunk and a head that looks at pairs."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.embed_m, self.embed_z = nn.Linear(3, C), nn.Linear(3, C)
        self.trunk = EvoformerStack(
            no_blocks=2,
            c_m=C,
            c_z=C,
            c_s=C,
            c_hidden_msa_att=4,
            c_hidden_opm=3,
            c_hidden_mul=6,
            c_hidden_pair_att=4,
            no_heads_msa=2,
            no_heads_pair=2,
            transition_n=2,
            msa_dropout=dropout,
            pair_dropout=dropout,
        )
        self.head, self.head_s = nn.Linear(C, 2), nn.Linear(C, 2)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():  # AlphaFold's begin at zero, which would hide mistakes
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, msa: Tensor, pair: Tensor, msa_mask: Tensor, pair_mask: Tensor) -> Tensor:
        """Return ``b i j 2``."""
        _, z, s = self.trunk(self.embed_m(msa), self.embed_z(pair), msa_mask, pair_mask)
        found: Tensor = self.head(z) + self.head_s(s).unsqueeze(1)
        return found


def loss(output: Tensor, batch: tuple[Any, Tensor]) -> Tensor:
    """Return the mean error over pairs."""
    return (output - batch[1]).square().mean()


def batch() -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the global batch, inputs and target; the last residues of some rows are masked."""
    generator = torch.Generator().manual_seed(2)

    def random(*shape: int) -> Tensor:
        return torch.randn(ROWS, *shape, generator=generator, dtype=torch.float64)

    present = torch.ones(ROWS, RESIDUES, dtype=torch.float64)
    present[1, 5:] = 0.0
    inputs = (
        random(SEQUENCES, RESIDUES, 3),
        random(RESIDUES, RESIDUES, 3),
        present.unsqueeze(1).expand(-1, SEQUENCES, -1).contiguous(),
        present.unsqueeze(1) * present.unsqueeze(2),
    )
    return inputs, random(RESIDUES, RESIDUES, 2)


def train(
    spec: dict[str, Any], steps: int = 2, folder: str = "", resume: str = "", recompute: str | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses and the weights after some steps."""
    example = batch() if "pipeline" in spec else None
    asked = dict(precision="fp64", optimizer=dict(name="adamw", lr=0.05), recompute=recompute)
    engine = Engine(Fold, spec, loss_fn=loss, seed=3, example=example, **asked)
    if resume:
        engine.load(resume)
    losses = [float(engine.train_step(engine.shard_batch(batch()))) for _ in range(steps)]
    if folder:
        engine.save(folder)
    state = {name: tensor.clone() for name, tensor in engine.full_state_dict().items()}
    engine.close()
    return losses, state


SPECS: dict[str, dict[str, Any]] = {
    "dap": dict(axial=2),
    "data and dap": dict(data=2, axial=2),
    "zero 1 and dap": dict(data=2, axial=2, zero=dict(stage=1)),
    "zero 3 and grid": dict(data=1, axial=dict(mode="grid", rows=2, columns=2), zero=dict(stage=3)),
    "pipeline and dap": dict(pipeline=2, axial=2),
    "recomputed, zero 3 and grid": dict(axial=dict(mode="grid", rows=2, columns=2), zero=dict(stage=3)),
}


def check(got: tuple[list[float], dict[str, Tensor]], wanted: tuple[list[float], dict[str, Tensor]]) -> None:
    """Raise unless losses and weights are equal."""
    assert got[0] == pytest.approx(wanted[0], rel=1e-9)
    for name, tensor in wanted[1].items():
        torch.testing.assert_close(got[1][name], tensor, rtol=1e-7, atol=1e-8, msg=name)


@pytest.fixture(scope="module")
def serial() -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of one process."""
    return train({})


@pytest.fixture(scope="module")
def longer() -> tuple[list[float], dict[str, Tensor]]:
    """The same after a step more."""
    return train({}, 3)


# The diagonal: both modes of axial, each stage of ZeRO, a pipeline, and blocks that are recomputed, each once. Beside ZeRO 1
# data ranks share the same sums; dap alone is the first leg of the test of checkpoints.
QUICK = ("zero 1 and dap", "pipeline and dap", "recomputed, zero 3 and grid")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SPECS]
)
def test_it_trains_as_on_one_process(name: str, serial: tuple[list[float], dict[str, Tensor]]) -> None:
    size = ParallelSpec.parse(SPECS[name]).world_size
    recompute = "blocks" if name.startswith("recomputed") else None
    for found in run_on_ranks(size, train, SPECS[name], recompute=recompute):
        check(found, serial)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_it_trains_three_steps_as_on_one_process(name: str, longer: tuple[list[float], dict[str, Tensor]]) -> None:
    size = ParallelSpec.parse(SPECS[name]).world_size
    recompute = "blocks" if name.startswith("recomputed") else None
    for found in run_on_ranks(size, train, SPECS[name], 3, recompute=recompute):
        check(found, longer)


@pytest.mark.slow
def test_it_trains_the_same_under_a_plan_of_memory(serial: tuple[list[float], dict[str, Tensor]]) -> None:
    """At 450 kB the plan takes chunks and recomputes; everything kept would take 1.4 MB."""
    for found in run_on_ranks(2, train, dict(axial=dict(size=2, memory=450_000), zero=dict(stage=3))):
        check(found, serial)


@pytest.mark.parametrize(("after", "wanted"), [(0, "serial"), pytest.param(1, "longer", marks=pytest.mark.slow)])
def test_a_checkpoint_goes_on_under_other_axes(
    after: int, wanted: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A step on two ranks, one on four, and so many after in one process."""
    first, second = str(tmp_path / "dap"), str(tmp_path / "grid")
    grid = dict(axial=dict(mode="grid", rows=2, columns=2))
    losses = run_on_ranks(2, train, dict(axial=2), 1, first)[0][0]
    losses += run_on_ranks(4, train, grid, 1, second, first)[0][0]
    third, state = train({}, after, "", second)
    check((losses + third, state), request.getfixturevalue(wanted))


def test_a_model_without_folding_blocks_is_refused() -> None:
    with (
        fake_world(2),
        pytest.raises(SpecError, match=r"axial=2.*Linear has no folding block: use those of meshfold.folding"),
    ):
        Engine(lambda: nn.Linear(2, 2), dict(axial=2))


def test_compiled_blocks_are_refused() -> None:
    with fake_world(2), pytest.raises(SpecError, match="compile under axial: the collectives of folding blocks"):
        Engine(Fold, dict(axial=2), compile=True)


def evaluate(spec: dict[str, Any]) -> list[float]:
    """Return losses of an evaluation, a step and an evaluation."""
    example = batch() if "pipeline" in spec else None
    asked = dict(precision="fp64", optimizer=dict(name="adamw", lr=0.05))
    with Engine(Fold, spec, loss_fn=loss, seed=3, example=example, **asked) as engine:
        return [
            float(run(engine.shard_batch(batch()))) for run in (engine.eval_step, engine.train_step, engine.eval_step)
        ]


@pytest.mark.few(1)
@pytest.mark.parametrize("spec", [dict(axial=2), dict(pipeline=2)], ids=str)
def test_evaluation_adds_in_place_and_is_that_of_one_process(spec: dict[str, Any]) -> None:
    wanted = run_on_ranks(1, evaluate, {})[0]
    for found in run_on_ranks(2, evaluate, spec):
        assert found == pytest.approx(wanted, rel=1e-9)
