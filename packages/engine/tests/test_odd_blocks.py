"""Models whose blocks are not a plain chain of equal modules train under any spec as in one process, or are refused before."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from meshfold.engine import Engine
from meshfold.mesh import LayoutError, MeshfoldError, SpecError
from meshfold.mesh.testing import ranks
from meshfold.mesh.testing.pool import POOLS

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
from odd_blocks import MODELS, RATE, batch_of, check, loss_of, made

SGD: dict[str, Any] = dict(name="sgd", lr=RATE)
TWO = dict(pipeline=dict(size=2, microbatches=2))
REFUSED = {
    "twice": "block 0 is called after block 3",
    "backwards": "block 2 is called after block 3",
    "skipping half": "stage 1 has blocks 2 to 3 of blocks, but the model's forward calls none of them",
    "computed": r"block 1 is called with a computed tensor as its norm.weight, as torch.func.functional_call",
    "widening": r"a Widening turns \(\d+, \d+, 8\) into \[\(\d+, \d+, 16\)\]: a model can be cut into stages only",
    "skips": "at block 2 among others, and a stage sends on only",
    "summing": "at block 2 among others, and a stage sends on only",
    "answers": "a Answering returns a Answer, whose contents are unknown",
    "running shared": "the forward changes the buffer 'blocks.2.mean'",
}
NOT_IN_STAGES = (*REFUSED, "fewer in evaluation", "asking")
IN_STAGES = [name for name in MODELS if name not in NOT_IN_STAGES]
IN_TWO = ("skipping 1", "skipping 2", "alone", "widening last")  # one of four stages could not run alone
IN_FOUR = [name for name in IN_STAGES if name not in IN_TWO]
SHARED = ("0101", "0120", "0000", "0011", "one inside", "outside too")


@pytest.mark.few(5)
@pytest.mark.parametrize("name", IN_STAGES)
@ranks(2)
def test_in_two_stages(name: str) -> None:
    check(name, TWO, microbatches=2)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [*IN_FOUR[::4], *(pytest.param(n, marks=pytest.mark.slow) for n in IN_FOUR[2::4])])
@ranks(4)
def test_in_four_stages_with_weight_gradients_apart(name: str) -> None:
    check(name, dict(pipeline=dict(size=4, microbatches=4, schedule="zb-h1")), microbatches=4)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["0120", "0011", "outside too", "one act", "one norm", "input", "encoder"])
@ranks(2)
def test_in_stages_that_a_rank_has_two_of(name: str) -> None:
    check(name, dict(pipeline=dict(size=2, microbatches=2, schedule="zb-v")), microbatches=2)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("0101", 1),
        ("one norm", 2),
        *((name, 3) for name in (*SHARED[::2], "one act", "one norm", "between", "stems")),
    ],
)
@ranks(4)
def test_in_stages_beside_zero(name: str, stage: int) -> None:
    check(name, dict(data=2, zero=dict(stage=stage), **TWO), microbatches=4)


BESIDE_TENSOR = ("0120", "0011", "outside too", "one norm", "between", "relu", "looping")
MODES: dict[str, dict[str, Any]] = {
    "1d": dict(tensor=2),
    "2d": dict(tensor=dict(mode="2d", grid=(1, 2))),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=pytest.mark.slow if (n + m) % 2 else ())
        for n, name in enumerate(BESIDE_TENSOR)
        for m, mode in enumerate(MODES)
    ],
)
@ranks(4)
def test_in_stages_beside_tensor_parallelism(name: str, mode: str) -> None:
    """Each model in one of the modes; the slow ones are the others."""
    check(name, {**TWO, **MODES[mode]}, microbatches=2)


WITHOUT_STAGES: dict[str, dict[str, Any]] = {
    "1d": dict(tensor=2),
    "2d": dict(tensor=dict(mode="2d", grid=(1, 2))),
    "zero 3": dict(data=2, zero=dict(stage=3)),
    "megatron": dict(sequence=dict(mode="megatron"), tensor=2),
}


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        pytest.param(name, spec, id=f"{name}-{title}", marks=pytest.mark.slow if (n + m) % 2 else ())
        for n, name in enumerate(["0120", "0011", "one inside", "relu", "middle"])
        for m, (title, spec) in enumerate(WITHOUT_STAGES.items())
    ],
)
@ranks(2)
def test_without_stages(name: str, parallel: dict[str, Any]) -> None:
    check(name, parallel)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ["0120", "0000", "one inside", "looping", "relu"])
@pytest.mark.parametrize("parallel", [dict(data=2), TWO], ids=["data", "pipeline"])
@ranks(2)
def test_recomputed(name: str, parallel: dict[str, Any]) -> None:
    check(name, parallel, microbatches=2 if "pipeline" in parallel else 1, recompute="blocks")


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["ring", "ulysses"])
@ranks(2)
def test_a_block_that_stands_twice_with_split_sequences(mode: str) -> None:
    check("0101 attending", dict(sequence=dict(mode=mode, size=2)))


@pytest.mark.few(1)
@pytest.mark.parametrize("stage", [1, 2, 3])
@ranks(3)
def test_a_stage_without_parameters_beside_zero(stage: int) -> None:
    parallel = dict(pipeline=dict(size=3, microbatches=2), zero=dict(stage=stage))
    check("alone", parallel, microbatches=2)
    check("alone", parallel, microbatches=2, clip_grad_norm=1e9, gradient_accumulation=1)


@ranks(3)
def test_a_stage_without_parameters_is_saved_and_loaded(tmp_path: Path) -> None:
    parallel: dict[str, Any] = dict(pipeline=dict(size=3, microbatches=2), zero=dict(stage=3))
    settings: dict[str, Any] = dict(optimizer=dict(name="adamw", lr=0.1), precision="fp64", loss_fn=loss_of)
    with Engine(made("alone"), parallel, **settings) as engine:
        engine.train_step(batch_of(0))
        engine.save(tmp_path)
        wanted = engine.train_step(batch_of(1)), engine.full_state_dict()
    with Engine(made("alone"), parallel, **settings) as engine:
        engine.load(tmp_path)
        found = engine.train_step(batch_of(1)), engine.full_state_dict()
    assert found[0] == wanted[0]
    assert all(torch.equal(found[1][name], value) for name, value in wanted[1].items())


@pytest.mark.few(1)
@pytest.mark.parametrize("stage", [0, 1, 3])
@ranks(2)
def test_a_block_on_two_ranks_is_saved_and_loaded(stage: int, tmp_path: Path) -> None:
    zero: dict[str, Any] = dict(zero=dict(stage=stage)) if stage else {}
    settings: dict[str, Any] = dict(optimizer=dict(name="adamw", lr=0.1), precision="fp64", loss_fn=loss_of)
    with Engine(lambda: made("shifted shared"), {**TWO, **zero}, **settings) as engine:
        engine.train_step(batch_of(0))
        engine.save(tmp_path)
        wanted = engine.train_step(batch_of(1)), engine.full_state_dict()
    with Engine(lambda: made("shifted shared"), dict(data=2), **settings) as engine:
        engine.load(tmp_path)
        found = engine.train_step(engine.shard_batch(batch_of(1))), engine.full_state_dict()
    assert found[0] == pytest.approx(wanted[0], rel=1e-9)
    for name, value in wanted[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", list(REFUSED))
@ranks(2)
def test_what_is_no_chain_is_refused_before_the_start(name: str) -> None:
    with pytest.raises((SpecError, LayoutError), match=REFUSED[name]):
        Engine(made(name), TWO, optimizer=SGD, precision="fp64", loss_fn=loss_of)


@pytest.fixture
def ranks_of_its_own() -> Iterator[None]:
    """Ranks that end with the test: an error of one stage leaves messages of the other unanswered."""
    yield
    POOLS.end_ranks()


@pytest.mark.usefixtures("ranks_of_its_own")
@ranks(2)
def test_a_forward_that_asks_for_a_blocks_class_is_refused_in_the_first_step() -> None:
    engine = Engine(made("asking"), TWO, optimizer=SGD, precision="fp64", loss_fn=loss_of)
    with pytest.raises(MeshfoldError, match=r"a Wanting, cannot be called as block 0 is \(TypeError"):
        engine.train_step(batch_of(0))


@ranks(2)
def test_blocks_that_evaluation_leaves_out_are_refused_there() -> None:
    with Engine(made("fewer in evaluation"), TWO, optimizer=SGD, precision="fp64", loss_fn=loss_of) as engine:
        first = engine.train_step(batch_of(0))
        with pytest.raises(LayoutError, match="calls none of them"):
            engine.eval_step(batch_of(0))
        assert engine.train_step(batch_of(0)) != first


@pytest.mark.few(2)
@pytest.mark.usefixtures("ranks_of_its_own")
@pytest.mark.parametrize(
    "parallel",
    [
        dict(data=2, zero=dict(stage=3)),
        dict(tensor=dict(mode="2d", grid=(1, 2))),
        dict(pipeline=dict(size=2, microbatches=2), zero=dict(stage=3)),
    ],
    ids=["zero 3", "2d", "stages"],
)
@ranks(2)
def test_a_block_that_changes_its_argument_where_that_is_a_view(parallel: dict[str, Any]) -> None:
    with Engine(made("first"), parallel, optimizer=SGD, precision="fp64", loss_fn=loss_of) as engine:
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace") as raised:
            engine.train_step(engine.shard_batch(batch_of(0)))
        assert any("write x = x + y for x += y" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("way", ["torch.compile(model)", "model.compile()"])
@ranks(2)
def test_a_compiled_model_is_refused(way: str) -> None:
    whole = made("plain")
    if way == "model.compile()":
        whole.compile(backend="eager")
    else:
        whole = torch.compile(whole, backend="eager")  # type: ignore[assignment]
    with pytest.raises(SpecError, match=r"compiled as a whole.*for block in model.blocks: block.compile\(\)"):
        Engine(whole, TWO, optimizer=SGD, precision="fp64", loss_fn=loss_of)


@ranks(2)
def test_compiled_blocks_are_not() -> None:
    losses = []
    for compiled in (False, True):
        model = made("0101")
        for block in model.blocks if compiled else ():  # type: ignore[union-attr]
            block.compile(backend="eager")
        with Engine(model, TWO, optimizer=SGD, precision="fp64", loss_fn=loss_of) as engine:
            losses.append([engine.train_step(batch_of(step)) for step in range(2)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
