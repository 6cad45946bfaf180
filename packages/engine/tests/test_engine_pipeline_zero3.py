"""An engine with ``pipeline`` and ``zero`` of stage 3 trains as one process does; stages gather what they use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.engine import Engine
from meshfold.engine.zero.states import ZeroStates
from meshfold.mesh import all_reduce, record
from meshfold.mesh.testing import ranks
from meshfold.models import generate
from meshfold.zero_gemini import Chunk, Gemini
from meshfold.zero_gemini.chunks import parameter_table as members

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
from pipeline_cases import MODELS, VOCABULARY, Case, batches, compare, engine_of, gpt, relay, run, watched

STEEP: dict[str, Any] = {"optimizer": dict(name="sgd", lr=1.0), "clip_grad_norm": None}
"""A step is the gradient itself."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Rooted(nn.Module):
    """Holds parameters itself, which backward reads again after the forward of the first stage was left half way.

    They are so large that no block's are in one chunk with the first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList([Block(16) for _ in range(4)])
        self.head = nn.Linear(16, VOCABULARY)
        self.wide, self.narrow = nn.Parameter(torch.ones(16, 256)), nn.Parameter(torch.ones(256, 16))
        nn.init.normal_(self.wide, std=0.2)
        nn.init.normal_(self.narrow, std=0.2)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = torch.tanh(self.embed(input_ids) @ self.wide) @ self.narrow
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / (
            (labels[:, 1:] != -100).sum().clamp(min=1)
        )


def frozen() -> nn.Module:
    """Of what is before the blocks, in them and behind them something is not trained."""
    model = gpt()
    parameters = dict(model.named_parameters())
    for name in list(parameters)[:1] + list(parameters)[5:9] + list(parameters)[-3:-2]:
        parameters[name].requires_grad_(False)
    return model


MODELS.update(rooted=Rooted, frozen=frozen, deep=partial(gpt, layers=6, dropout=0.2))


@contextmanager
def small_chunks() -> Iterator[None]:
    """As many chunks as there are of a model that is not a test's."""
    made, members.LEAST_ELEMS = members.LEAST_ELEMS, 2**9
    try:
        yield
    finally:
        members.LEAST_ELEMS = made


def runs(cases: list[Case], given: list[dict[str, Tensor]]) -> list[Any]:
    with small_chunks():
        return [run(parallel, model, given, **settings) for parallel, model, settings in cases]


def ordered(schedule: Any, data: int = 2, **more: Any) -> dict[str, Any]:
    zero = more.pop("zero", {})
    return dict(
        data=data,
        pipeline=dict(size=2, schedule=schedule, microbatches=4, **more),
        zero=dict(stage=3, **zero),
    )


def one_by_one(*, ranks: int, microbatches: int) -> str:
    """Each micro-batch there and back before the next."""
    return "\n".join(
        " ".join(f"{rank}F{m} {rank}B{m} {rank}W{m}" for m in range(microbatches)) for rank in range(ranks)
    )


def gemini_of(engine: Engine) -> Gemini:
    states = engine.states
    assert isinstance(states, ZeroStates)
    return states.gemini


# -- training is that of one process ----------------------------------------------------------------------------------


def test_every_gradient() -> None:
    """One step of the gradient itself, under schedules with and without W apart, ties over stages, and on one rank."""
    cases: list[Case] = [
        (ordered("1f1b"), "tied", STEEP),
        (ordered("zb-h1"), "frozen", STEEP),
        (ordered("zb-v"), "rooted", STEEP),
    ]
    compare(4, cases, batches(1), runs)


def test_schedules() -> None:
    compare(4, [(ordered("interleaved", chunks=2, zero=dict(placement="cpu")), "tied", {})], batches(3), runs)


@pytest.mark.slow
def test_more_schedules() -> None:
    cases: list[Case] = [
        (ordered("zb-h2"), "dropping", {"gradient_accumulation": 2}),
        (ordered("gpipe"), "llama", {}),
        (ordered("1f1b"), "rooted", {"recompute": "blocks"}),
        (ordered("interleaved", chunks=2), "dropping", {"recompute": "blocks"}),
        (ordered("hanayo", waves=1), "frozen", {"gradient_accumulation": 2}),
        (ordered("zb-v", zero=dict(placement="cpu")), "llama", {}),
        (ordered("dualpipe-v"), "dropping", {"clip_grad_norm": None, "clip_grad_value": 0.02}),
        (ordered("dualpipe-v"), "tied", STEEP),
        (ordered("auto"), "tied", {}),
        (
            dict(tensor=2, pipeline=dict(size=2, schedule="zb-h1"), zero=dict(stage=3, placement="cpu")),
            "tied",
            {},
        ),
    ]
    compare(4, cases, batches(4), runs)


@pytest.mark.slow
def test_with_tensor_parallelism_and_on_more_ranks() -> None:
    cases: list[Case] = [
        (dict(data=2, tensor=2, pipeline=dict(size=2, schedule="zb-h1"), zero=dict(stage=3)), "tied", {}),
        (dict(data=2, pipeline=dict(size=4, schedule="1f1b"), zero=dict(stage=3)), "dropping", {}),
    ]
    compare(8, cases, batches(4), runs)


@pytest.mark.slow  # smaller batches have tests in test_engine_pipeline.py
def test_data_ranks_with_fewer_micro_batches() -> None:
    """A last batch of which one data coordinate has two rows and the other one: stages are used equally often."""
    given = [*batches(1), *batches(1, rows=3, seed=5), *batches(1, rows=1, seed=6), *batches(2, seed=7)]
    given[2]["labels"] = given[2]["input_ids"]  # its only row counts
    cases: list[Case] = [
        (ordered("interleaved", chunks=2), "llama", {"gradient_accumulation": 5}),
        # The smaller batch ends where the one before went on with the first chunk again, and evaluation follows.
        (ordered(one_by_one), "gpt", {}),
    ]
    compare(4, cases, given, runs)


# -- what is gathered, and when ---------------------------------------------------------------------------------------


@ranks(4)
def test_chunks_stay_gathered_where_there_is_room() -> None:
    """The first step gathers for every use; with room for all, later ones gather each chunk once; with some, fewer."""
    given, steps, together, states = batches(3), {}, {}, {}
    for room in ("none", "some", "all"):
        with small_chunks():
            engine = engine_of(ordered("zb-h1"), "deep")
        with engine:
            gemini = gemini_of(engine)
            chunks = [chunk for chunk in gemini.chunks if not chunk.resident]
            sizes, most = [chunk.gathered_bytes for chunk in chunks], 0
            allowed = {"none": 0, "some": 2 * max(sizes), "all": sum(sizes)}[room]
            at_once: list[int] = []
            for module in engine.model.modules():
                module.register_forward_pre_hook(partial(note, at_once, chunks))
            gathers = []
            for number, batch in enumerate(given):
                if number:
                    assert gemini.gather_cache_bytes >= allowed  # nobody limits a CPU: all may stay
                    gemini.gather_cache_bytes = allowed
                at_once.clear()
                with record() as log:
                    engine.train_step(engine.shard_batch(batch))
                own = [e for e in log.entries if e.kind == "all_gather" and e.axes == ("data",)]
                gathers.append(sum(entry.bytes > 100 for entry in own))
                most = max(at_once)
                assert gathered(chunks) == 0  # when the optimizer has stepped
            steps[room], together[room], states[room] = gathers, most, engine.full_state_dict()
    uses = 2 * 4  # forward and backward of four micro-batches; the last forward's last chunk is still there
    assert steps["none"][0] > (uses - 1) * (len(chunks) - 3)
    assert steps["all"][1:] == [len(chunks)] * 2
    assert len(chunks) < steps["some"][2] < 0.8 * steps["none"][2]
    assert together["none"] < together["some"] <= together["none"] + 2 * max(sizes)
    assert together["all"] == sum(sizes)
    for room in ("some", "all"):  # not by a bit
        assert all(torch.equal(states[room][name], value) for name, value in states["none"].items())


def note(seen: list[int], chunks: list[Chunk], *_: Any) -> None:
    seen.append(gathered(chunks))


def gathered(chunks: list[Chunk]) -> int:
    return sum(chunk.gathered_bytes for chunk in chunks if chunk.is_gathered)


@pytest.mark.slow  # limits of a pipeline have tests in test_residency_pipeline.py
@ranks(4)
def test_what_stays_is_what_a_limit_leaves() -> None:
    """Under a limit that the plan accepts some may stay; under a higher one more."""
    batch, least, more = batches(1)[0], 365_000, 20_000
    stayed = []
    for limit in (least, least + more):
        found, left = peaks_of_steps(f"{limit}B", batch)
        assert max(found) <= limit
        stayed.append(left)
    assert 0 < stayed[0] < stayed[1]


def peaks_of_steps(limit: str, batch: dict[str, Tensor]) -> tuple[list[int], int]:
    """Most bytes of chunks at once in each of four steps, on any rank; and how many may stay in the last, at least."""
    zero, found, stayed = dict(placement="cuda", gpu_memory_limit=limit), [], 0
    with small_chunks(), engine_of(ordered("1f1b", zero=zero), "dropping") as engine:
        gemini, everyone = gemini_of(engine), engine.mesh.group(*engine.mesh.names)
        for _ in range(4):
            stayed = int(all_reduce(torch.tensor([gemini.gather_cache_bytes]), everyone, "min"))
            with watched(gemini) as seen:
                engine.train_step(engine.shard_batch(batch))
            found.append(int(all_reduce(torch.tensor([max(seen)]), everyone, "max")))
    return found, stayed


@ranks(4)
def test_evaluation_and_text_between_steps() -> None:
    """Forwards alone gather, release, and see what the last step has made of the weights."""
    given = batches(3)
    with small_chunks(), engine_of(ordered("1f1b"), "dropping") as engine:
        engine.train_step(engine.shard_batch(given[0]))
        first = engine.eval_step(engine.shard_batch(given[2]))
        ids = given[0]["input_ids"][:3, :4]
        text = generate(engine.generator, ids, 2, temperature=0.0)
        assert not any(chunk.is_gathered for chunk in gemini_of(engine).chunks if not chunk.resident)
        state = engine.full_state_dict()
        changed = {name: value * 1.5 for name, value in state.items()}
        engine.load_state_dict(changed)
        assert engine.eval_step(engine.shard_batch(given[2])) != pytest.approx(first, rel=1e-6)
        engine.load_state_dict(state)
        assert engine.eval_step(engine.shard_batch(given[2])) == pytest.approx(first, rel=1e-12)
        assert text.shape == (3, 6)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def leg(parallel: dict[str, Any], load: str, save: str, given: list[dict[str, Tensor]]) -> Any:
    with small_chunks(), engine_of(parallel, "dropping") as engine:
        before = None
        if load:
            engine.load(load)
            before = engine.full_state_dict()
        losses = [engine.train_step(engine.shard_batch(batch)) for batch in given]
        engine.save(save)
        return losses, before, engine.full_state_dict()


LEGS: list[tuple[int, dict[str, Any]]] = [
    (4, ordered("zb-v")),
    (1, {}),
    (4, dict(tensor=2, pipeline=2, zero=dict(stage=3, placement="cpu"))),
    (2, dict(data=2, zero=dict(stage=3))),
    (4, ordered("1f1b")),
]


@pytest.mark.parametrize("legs", [[LEGS[0], LEGS[2]], pytest.param(LEGS, marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_run_handed_from_spec_to_spec_is_the_unbroken_run(
    legs: list[tuple[int, dict[str, Any]]], tmp_path: Path
) -> None:
    relay(legs, leg, tmp_path)
