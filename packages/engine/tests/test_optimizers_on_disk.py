"""State of optimizers of elements, LAMB and LARS on disk: ten steps equal those of one process, and it is saved and resumed."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from meshfold.mesh import record
from meshfold.mesh.testing import run_on_ranks

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
from pipeline_cases import MODELS, batches, compare, engine_of, optimizer_leg, relay, steps_alone

STEPS = 10
OPTIMIZERS: dict[str, dict[str, Any]] = {
    # A large epsilon: else gradients that are zero but for rounding, such as those of key biases, count as much as others.
    "lamb": dict(name="lamb", lr=0.02, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.1),
    "lars": dict(name="lars", lr=0.5, trust_coeff=0.02, weight_decay=0.1, no_decay="norms_and_biases"),
    "lion": dict(name="lion", lr=1e-3, weight_decay=0.1),
    "sgd": dict(name="sgd", lr=0.1, momentum=0.9),
}


def on_disk(folder: Path, **zero: Any) -> dict[str, Any]:
    return dict(zero=dict(stage=3, placement="cpu", offload_path=str(folder), **zero))


def test_ten_steps_on_two_ranks_are_those_of_one_process(tmp_path: Path) -> None:
    cases: list[Any] = [(on_disk(tmp_path), "two", {"optimizer": one}) for one in OPTIMIZERS.values()]
    compare(2, cases, batches(STEPS), steps_alone, 1e-12)
    assert not list(tmp_path.iterdir())


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["lion", "sgd"])
def test_ten_steps_in_the_backward_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    """Without clipping: each chunk as soon as its gradient is complete."""
    settings: dict[str, Any] = {"optimizer": OPTIMIZERS[name], "clip_grad_norm": None}
    compare(2, [(on_disk(tmp_path), "two", settings)], batches(STEPS), steps_alone, 1e-12)
    with engine_of(on_disk(tmp_path), "two", **settings) as engine:
        engine.train_step(batches(1)[0])
        assert not engine.states.gemini.holds_gradients  # type: ignore[attr-defined]


def collectives(folder: Path) -> list[Counter[tuple[str, int]]]:
    """Return what a step sends, with LAMB on disk and in memory."""
    found = []
    for parallel in (on_disk(folder), dict(zero=dict(stage=3, placement="cpu"))):
        with engine_of(parallel, "shallow", optimizer=OPTIMIZERS["lamb"]) as engine:
            files = sorted(path.name for path in folder.iterdir())
            with record() as log:
                engine.train_step(engine.shard_batch(batches(1)[0]))
            found.append(Counter((one.kind, one.block_bytes) for one in log.entries))
            assert len(files) == 2 * ("offload_path" in parallel["zero"]), files
    return found


def test_norms_on_disk_are_summed_in_one_collective_a_step(tmp_path: Path) -> None:
    """A step on disk sends as a step in memory does, and a flag that tells whether a rank's disk failed."""
    for away, here in run_on_ranks(2, collectives, tmp_path):
        assert not here - away
        assert [kind for (kind, _), _ in (away - here).items()] in ([], ["all_reduce"])


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "precision", "state", "reads"),
    [("lion", "fp32", 4, 1), ("sgd", "bf16", 8, 1), ("lars", "fp32", 4, 2), ("lamb", "bf16", 12, 2)],
)
def test_plans_count_what_the_optimizer_keeps(
    name: str, precision: str, state: int, reads: int, tmp_path: Path
) -> None:
    with engine_of(on_disk(tmp_path), "two", optimizer=OPTIMIZERS[name], precision=precision) as engine:
        regime = engine.states.residency._plans._regime  # type: ignore[attr-defined]
        assert (regime.state, regime.disk_reads) == (state, reads)
        elements = sum(p.numel() for p in MODELS["two"]().parameters())
        (file,) = tmp_path.iterdir()
        # Chunks are padded, and the file has pages of its own.
        assert state * elements <= file.stat().st_size <= 1.3 * state * elements + 3 * 4096


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "precision", "state"), [("lion", "fp32", 4), ("sgd", "bf16", 8), ("lamb", "bf16", 12)]
)
def test_plans_without_a_disk_count_it_too(name: str, precision: str, state: int) -> None:
    """They counted Adam's: 8 bytes an element in float32, 10 in bfloat16."""
    parallel = dict(zero=dict(stage=3, placement="cpu"))
    with engine_of(parallel, "two", optimizer=OPTIMIZERS[name], precision=precision) as engine:
        gemini = engine.states.gemini  # type: ignore[attr-defined]
        assert engine.states.residency._plans._regime.state == state  # type: ignore[attr-defined]
        assert gemini.bytes_of(gemini.chunks[0])[1] == state * gemini.chunks[0].shard.numel()


@pytest.mark.parametrize("name", ["lamb", "sgd"])
def test_state_goes_from_disk_to_memory_and_back(name: str, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    relay(
        [(2, on_disk(tmp_path / "scratch")), (1, {}), (1, on_disk(tmp_path / "scratch"))],
        optimizer_leg,
        tmp_path,
        OPTIMIZERS[name],
    )
