"""Engine(cuda_graph=True) under zero: a step is captured in segments, and its replays make the same moves of chunks.

On a CPU segments are recorded operators (:mod:`recorded_segments`). Tests on a GPU capture graphs.
"""

from __future__ import annotations

import gc
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshfold.engine import Engine
from meshfold.engine.zero import capture_rules
from meshfold.engine.zero.capture_rules import CaptureReport
from meshfold.models import GPT, GPTConfig
from meshfold.zero_gemini import ChunkPlacement, Gemini
from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.sharded_model import chunked_model
from meshfold.zero_gemini.sharded_model.build import lay_out_parameters

sys.path.append(str(Path(__file__).parent))  # for the helper beside this file
from recorded_segments import recorded

WORDS, LENGTH = 48, 16
HOST = dict(zero=dict(stage=3, placement="cpu"))


def gpt(layers: int = 3) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=WORDS, hidden=32, layers=layers, heads=4, max_positions=LENGTH))


def batches(count: int, length: int = 8, seed: int = 3) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        ids = torch.randint(WORDS, (2, length), generator=generator)
        labels = ids.clone()
        labels[0, : 1 + number % 5] = -100
        made.append(dict(input_ids=ids, labels=labels))
    return made


def engine_of(model: nn.Module, parallel: dict[str, Any] = HOST, **settings: Any) -> Engine:
    return Engine(
        model,
        parallel,
        **{"optimizer": dict(name="adamw", lr=1e-2), "clip_grad_norm": 1.0, "precision": "fp32", **settings},
    )


def spread(engine: Engine) -> None:
    """Put chunks where a plan would: some on the device, some with their state on the host, others all on the host."""
    gemini = engine.states.gemini
    tiers = [("host", "host"), ("device", "host"), ("device", "device")]
    gemini.move(
        {
            chunk: ChunkPlacement(parameters=tiers[number % 3][0], state=tiers[number % 3][1])  # type: ignore[arg-type]
            for number, chunk in enumerate(gemini.chunks)
        }
    )


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make several chunks of a small model."""

    def laid_out(*args: Any, **settings: Any) -> Any:
        return lay_out_parameters(*args, **{**settings, "chunk_elems": 6144})

    monkeypatch.setattr(chunked_model, "lay_out_parameters", laid_out)


def train(engine: Engine, work: list[Any]) -> list[float]:
    """Losses and norms of some steps."""
    found = []
    for batch in work:
        found.append(engine.train_step(batch))
        assert engine.last is not None
        found.append(engine.last.grad_norm or 0.0)
    return found


def weights_of(engine: Engine) -> list[Tensor]:
    return [value.clone() for value in engine.full_state_dict().values()]


def report_of(engine: Engine) -> CaptureReport:
    assert engine.capture is not None
    return engine.capture


def twice(
    monkeypatch: pytest.MonkeyPatch, use: Callable[[Engine], list[float]], **settings: Any
) -> tuple[CaptureReport, int]:
    """Use an engine whose steps are replayed and one whose are not: losses, norms and weights are equal to the bit.

    Returns:
        What was captured, and how often it began.
    """
    results = []
    with recorded(monkeypatch) as made:
        for cuda_graph in (False, True):
            with engine_of(gpt(), cuda_graph=cuda_graph, **settings) as engine:
                found = use(engine)
                results.append((found, weights_of(engine), engine.capture))
    (losses, weights, none), (replayed, others, report) = results
    assert losses == replayed and not any(map(math.isnan, losses))
    assert all(map(torch.equal, weights, others))
    assert none is None and report is not None
    return report, len(made)


@pytest.mark.parametrize(
    ("precision", "spreads"),
    [("fp32", True), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("fp32", False), ("fp64", True)))],
)
def test_replays_train_as_eager_steps(monkeypatch: pytest.MonkeyPatch, precision: str, spreads: bool) -> None:
    """Chunks on the host, on the device, and with only their state on the host; targets that do not count."""

    def use(engine: Engine) -> list[float]:
        if spreads:
            spread(engine)
        return train(engine, batches(6))

    report, began = twice(monkeypatch, use, precision=precision)
    assert (report.captures, report.replays, report.why_eager, began) == (1, 4, "", 1)
    assert report.graphs > 8


@pytest.mark.parametrize("some", [False, True])
def test_blocks_that_recompute_and_speculative_steps(some: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host steps all or some chunks into a shadow copy while backward goes on, from gradients that replays send; blocks repeat
    their forward."""
    speculated = []

    def use(engine: Engine) -> list[float]:
        gemini = engine.states.gemini
        assert gemini.step_speculatively(True, chunks=gemini.chunks[:3] if some else None)
        found = train(engine, batches(7))
        speculated.append(engine.states.gemini._speculative.are_made)  # type: ignore[union-attr]
        return found

    report, _ = twice(monkeypatch, use, recompute="blocks", clip_grad_norm=1e3)
    assert (report.captures, report.replays) == (1, 5) and speculated == [True, True]


def test_what_frees_the_graphs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Evaluation, a batch of another shape, chunks that move, and a checkpoint that is loaded, between replays."""
    seen = []

    def use(engine: Engine) -> list[float]:
        def steps(count: int, **form: int) -> None:
            nonlocal found
            found += train(engine, batches(count, **form))
            if engine.capture is not None:
                seen.append((engine.capture.captures, engine.capture.replays))

        found: list[float] = []
        steps(4)
        engine.save(tmp_path / f"saved-{len(seen)}")
        found.append(engine.eval_step(batches(1, length=5)[0]))  # frees them, after few replays: waits longer
        steps(4)
        steps(1, length=6)  # again
        steps(6)
        spread(engine)  # a plan's moves do not count
        steps(6)
        engine.load(sorted(tmp_path.iterdir())[-1])  # the same addresses
        steps(2)
        return found

    report, _ = twice(monkeypatch, use)
    # 1 eager and 1 captured step; then 2 and 1; then (after one of another shape) 4 and 1; then 1 and 1 under new placements.
    assert seen == [(1, 2), (2, 3), (2, 3), (3, 4), (4, 8), (4, 10)]
    assert report.why_eager == ""


def test_moves_have_the_same_addresses_in_each_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[tuple[str, int]] = []
    copy = Chunk.copy_shard

    def noted(chunk: Chunk, place: Tensor) -> Any:
        moved.append((repr(chunk), place.data_ptr()))
        return copy(chunk, place)

    monkeypatch.setattr(Chunk, "copy_shard", noted)
    with recorded(monkeypatch), engine_of(gpt(), cuda_graph=True) as engine:
        runs = []
        for batch in batches(5):
            engine.train_step(batch)
            runs.append([*moved])
            moved.clear()
        chunks = len(engine.states.gemini.chunks)
    assert not runs[0] and not runs[1]  # eager and captured: chunks themselves are gathered
    # Which of two chunks goes first depends on the host's optimizer.
    assert sorted(runs[2]) == sorted(runs[3]) == sorted(runs[4])
    assert chunks > 4 and max(Counter(runs[2]).values()) <= 3  # the first and the last one are used in several places


def test_replays_gather_as_far_ahead_as_a_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, norms and weights are those of eager steps; a chunk whose step is late is asked about again at every unit."""
    ahead: dict[Chunk, bool] = {}  # whether its first copy of a replay begins before the unit that reads it
    asked: set[Chunk] = set()
    copy = Chunk.copy_shard

    def late(chunk: Chunk) -> bool:
        first = chunk not in asked
        asked.add(chunk)
        return not first

    def use(engine: Engine) -> list[float]:
        spread(engine)
        found, gemini = train(engine, batches(1)), engine.states.gemini
        units = [*gemini._runtime._seen]
        gemini.gather_by([unit.name for unit in units], [max(0, at - 3) for at in range(len(units))])
        found += train(engine, batches(3))

        def noted(chunk: Chunk, place: Tensor) -> Any:
            use = next(at for at, unit in enumerate(units, 1) if chunk in gemini._runtime._chunks[unit])
            ahead.setdefault(chunk, gemini.units_entered < use or use < 3)
            return copy(chunk, place)

        monkeypatch.setattr(Chunk, "copy_shard", noted)
        monkeypatch.setattr(Chunk, "can_gather_early", property(late))
        asked.clear()
        found += train(engine, batches(1))
        monkeypatch.setattr(Chunk, "copy_shard", copy)
        return found

    report, _ = twice(monkeypatch, use)
    assert (report.captures, report.replays, report.why_eager) == (1, 3, "")
    assert len(ahead) > 2 and all(ahead.values())


def test_a_replay_waits_at_the_places_of_an_eager_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a step are timed between its waits for parameters, of which replays know the units as hooks do."""
    found = []
    with recorded(monkeypatch):
        for cuda_graph in (False, True):
            with engine_of(gpt(), cuda_graph=cuda_graph) as engine:
                spread(engine)
                train(engine, batches(3))
                gemini, places = engine.states.gemini, list[int]()

                @contextmanager
                def watch(what: str, gemini: Gemini = gemini, places: list[int] = places) -> Iterator[None]:
                    yield
                    if what == "parameters":
                        places.append(gemini.units_entered)

                with gemini.memory.waiting.watched(watch):
                    train(engine, batches(1))
                found.append(places)
                runtime = gemini._runtime
                units = len(runtime.order)
                heavy = {at for at, unit in enumerate(runtime.order, 1) if unit not in runtime._light}
                if cuda_graph:
                    assert report_of(engine).replays == 2
    eager, replayed = found
    after = {0, units}  # parameters are shown again after the step
    assert set(replayed) - after >= set(eager) - after and len(set(eager) - after) > 4
    assert set(replayed) >= heavy  # a unit is timed by itself, also if no chunk moves


def test_a_loss_that_is_not_finite_is_searched_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search repeats the step with its hooks, without graphs; the step is skipped, and later ones are captured again."""

    def loss(output: Any, batch: Any) -> Tensor:
        found: Tensor = output.logits.square().mean() * batch["factor"]
        return found

    loss.batch_fields = ("factor",)  # type: ignore[attr-defined]

    def use(engine: Engine) -> list[float]:
        found = []
        for number, batch in enumerate(batches(8)):
            factor = torch.tensor(math.inf if number == 3 else 1.0)
            engine.train_step(dict(input_ids=batch["input_ids"], factor=factor))
            found.append(float(engine.skipped_steps))
        return found

    report, _ = twice(monkeypatch, use, nonfinite="skip", loss_fn=loss)
    assert (report.captures, report.replays) == (2, 4)


class Block(nn.Module):
    """Looks at a value in its forward, or draws random numbers, and calls attention, which draws none."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.first, self.second, self.draws = nn.Linear(8, 64), nn.Linear(64, 8), draws

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        out = nn.functional.scaled_dot_product_attention(*[out.view(1, 1, -1, 8)] * 3).view_as(x)
        return out + 0.0 * torch.rand_like(x) if self.draws else out * (1.0 if float(x.detach().sum()) > 1e9 else 2.0)


class Waiting(nn.Module):
    """Two such blocks."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(draws), Block(draws)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(
    ("draws", "settings", "why"),
    [
        (False, dict(), "it cannot be captured: RuntimeError: operation not permitted when stream is capturing"),
        (
            False,
            dict(recompute="blocks"),
            "it cannot be captured: RuntimeError: operation not permitted when stream is capturing",
        ),
        (True, dict(recompute="blocks"), "aten::rand_like draws random numbers, and blocks that recompute"),
        (True, dict(clip_grad_norm=None), "chunks are stepped while backward runs"),
        (True, dict(gradient_accumulation=2), "gradients are accumulated over several backwards"),
    ],
)
def test_steps_that_cannot_be_captured_run_eagerly(
    monkeypatch: pytest.MonkeyPatch, draws: bool, settings: dict[str, Any], why: str
) -> None:
    results = []
    work = (torch.ones(2, 8), torch.ones(2, 8))
    for cuda_graph in (False, True):
        with (
            recorded(monkeypatch),
            engine_of(
                Waiting(draws),
                loss_fn=lambda output, batch: (output - batch[1]).square().mean(),
                cuda_graph=cuda_graph,
                **settings,
            ) as engine,
        ):
            results.append([engine.train_step(work) for _ in range(6)])
            if cuda_graph:
                report = report_of(engine)
                assert report.replays == 0 and report.why_eager.startswith(why)
    assert results[0] == results[1]


def test_eager_and_captured_backwards_run_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that keeps something for each thread then has it when a graph is captured."""
    alone = []
    with recorded(monkeypatch), engine_of(gpt(), cuda_graph=True) as engine:
        weight = next(engine.model.parameters())
        weight.register_hook(lambda gradient: alone.append(not torch._C._is_multithreading_enabled()))
        train(engine, batches(3))
        assert report_of(engine).replays == 1
    assert alone == [True, True]  # hooks do not run in the replay


def test_a_search_for_draws_that_does_not_fit_leaves_steps_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs without compiled code, which may take more memory than the step."""

    def random_draws(model: nn.Module, run: Callable[[], object]) -> list[str]:
        raise torch.OutOfMemoryError("160 MiB")

    monkeypatch.setattr(capture_rules, "random_draws", random_draws)
    with recorded(monkeypatch), engine_of(gpt(), cuda_graph=True, recompute="blocks") as engine:
        losses = train(engine, batches(4))[::2]
        assert report_of(engine).captures == 0 and "does not fit into memory" in report_of(engine).why_eager
    assert all(map(math.isfinite, losses))


def test_a_step_without_a_plan_on_a_cpu_says_so() -> None:
    with engine_of(gpt(), cuda_graph=True) as engine:
        train(engine, batches(3))
        assert report_of(engine) == CaptureReport(why_eager="a CPU has no CUDA graphs")


def test_a_dropped_engine_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the garbage collector, also if graphs were captured."""
    with recorded(monkeypatch):
        gc.collect()
        gc.disable()
        try:
            engine = engine_of(gpt(), cuda_graph=True)
            train(engine, batches(3))
            engine.close()
            left = [weakref.ref(engine), *(weakref.ref(each) for each in engine.model.parameters())]
            del engine
            assert not any(each() is not None for each in left)
        finally:
            gc.enable()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures graphs: needs a GPU")
@pytest.mark.parametrize("recompute", [None, "blocks"])
@pytest.mark.parametrize("speculative", ["", "all", "some"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_graphs_on_a_gpu(precision: str, speculative: str, recompute: str | None) -> None:
    """Losses and weights of replayed steps are those of eager ones; evaluation between them frees the graphs."""
    results = []
    for cuda_graph in (False, True):
        with engine_of(
            gpt(),
            cuda_graph=cuda_graph,
            precision=precision,
            recompute=recompute,
            clip_grad_norm=1e3 if speculative else 1.0,
            optimizer=dict(name="adamw", lr=1e-3, eps=1e-4),
        ) as engine:
            losses = train(engine, batches(3))
            spread(engine)
            if speculative:
                gemini = engine.states.gemini
                chosen = gemini.chunks[: len(gemini.chunks) // 2] if speculative == "some" else None
                assert gemini.step_speculatively(True, chunks=chosen)
            losses += train(engine, batches(6))
            losses.append(engine.eval_step(batches(1, length=5)[0]))
            losses += train(engine, batches(8, seed=4))
            results.append((losses, weights_of(engine)))
            if cuda_graph:
                report = report_of(engine)
                assert report.captures >= 2 and report.replays >= 6 and report.why_eager == "", report
    tolerance = 1e-4 if precision == "fp32" else 2e-2
    assert results[0][0] == pytest.approx(results[1][0], rel=tolerance)
    for eager, replayed in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(eager, replayed, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures graphs: needs a GPU")
def test_a_model_that_waits_for_the_gpu_runs_eagerly() -> None:
    work = (torch.ones(2, 8), torch.ones(2, 8))
    with engine_of(
        Waiting(draws=False), loss_fn=lambda output, batch: (output - batch[1]).square().mean(), cuda_graph=True
    ) as engine:
        with pytest.warns(UserWarning, match="steps run without graphs now: it cannot be captured"):
            losses = [engine.train_step(work) for _ in range(8)]
        assert report_of(engine).replays == 0 and losses[-1] < losses[0]
