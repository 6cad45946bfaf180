"""From a trace to the planner's problem: windows, seconds and bytes by hand."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from meshfold.mesh import Mesh
from meshfold.mesh.errors import SpecError
from meshfold.zero_gemini.errors import MemoryPlanError
from meshfold.zero_gemini.planner import (
    REGIMES,
    Limits,
    Workload,
    cpu,
    cuda,
    exhaustive,
    on_device,
    plan,
    static,
)
from meshfold.zero_gemini.planner.memory import gather_windows, gpu_kinds, layer_bytes
from meshfold.zero_gemini.profiler import ChunkUse, Trace, TracedLayer, TracedTimestep, chunk_uses, workload_of

sys.path.append(str(Path(__file__).parent))
from planner_cases import EMULATED

A = REGIMES["A"]


def timestep(i: int, unit: str, *, backward: bool, until: int | None = None, seconds: float = 1.0) -> TracedTimestep:
    return TracedTimestep(
        unit=unit,
        backward=backward,
        until=i if until is None else until,
        non_model_bytes=100 + i,
        left_bytes=i,
        seconds=seconds,
        waited_seconds=0.0,
    )


def trace(*units: str) -> Trace:
    """Forward in the order given, backward in the opposite one."""
    order = [*units, *reversed(units)]
    return Trace(timesteps=tuple(timestep(i, unit, backward=i >= len(units)) for i, unit in enumerate(order)))


def use(name: str, elems: int = 1000, ranks: int = 1, *, trainable: bool = True, **units: int) -> ChunkUse:
    return ChunkUse(name=name, elems=elems, gathered_elems=elems * ranks, units=units, trainable=trainable)


def work(traced: Trace, *chunks: ChunkUse, **changes: Any) -> Workload:
    given: dict[str, Any] = {"name": "it", "regime": A, "tokens": 8, **changes}
    return workload_of(traced, chunks, **given)


def test_chunks_have_the_timesteps_of_their_units() -> None:
    found = work(trace("a", "b", "c"), use("x", a=600, b=400), use("y", b=100, c=900))
    x, y = found.chunks
    assert (x.forward, x.backward, x.visits) == ((0, 1), (4, 5), ((0, 1), (4, 5)))
    assert (y.forward, y.backward, y.visits) == ((1, 2), (3, 4), ((1, 2), (3, 4)))
    assert found.non_model_bytes == (100, 101, 102, 103, 104, 105) and found.forward_timesteps == 3
    # unit b's second is shared out by elements
    assert x.forward_seconds == pytest.approx(1 + 0.8) and y.backward_seconds == pytest.approx(1 + 0.2)
    assert found.clipping and found.strategies == ("just_in_time_split",)


def test_a_tied_chunk_is_away_between_its_uses() -> None:
    found = work(trace("embed", "a", "b", "head"), use("tied", embed=1000, head=1000), use("x", a=500, b=500))
    tied = found.chunks[0]
    assert tied.visits == ((0, 0), (3, 3), (4, 4), (7, 7))
    assert (tied.forward, tied.backward) == ((0, 3), (4, 7))  # its gradient is there from first to last
    assert gather_windows(tied, found) == ((0, 0), (2, 4), (6, 7))
    gathered = gpu_kinds(found)["gathered"][0, 2]
    assert gathered.tolist() == [2000, 0, 2000, 2000, 2000, 0, 2000, 2000]
    # loaded twice in the forward, once in the backward
    up = {term.phase: term.seconds for term in cpu(found, EMULATED).terms if term.name == "h2d"}
    assert up["forward"] == pytest.approx((2 * 2000 + 2000) / EMULATED.h2d)
    assert up["backward"] == pytest.approx((2000 + 2000) / EMULATED.h2d)


def test_units_that_lie_in_one_another_keep_their_chunks() -> None:
    timesteps = [
        timestep(0, "", backward=False, until=2),
        timestep(1, "a", backward=False),
        timestep(2, "b", backward=False),
    ]
    timesteps += [
        timestep(3, "", backward=True, until=5),
        timestep(4, "b", backward=True),
        timestep(5, "a", backward=True),
    ]
    found = work(
        Trace(timesteps=tuple(timesteps)),
        replace(use("root"), units={"": 1000}),
        use("x", a=1000),
        use("y", b=1000),
    )
    assert found.chunks[0].visits == ((0, 2), (3, 5))
    assert gather_windows(found.chunks[0], found) == ((0, 5),)


def test_a_tied_parameter_has_no_gradient_before_its_last_use() -> None:
    """Autograd adds up what its uses give, in memory that the trace has counted, and hands it over once."""
    seen = trace("a", "b", "c")  # backward: c, b, a in 3, 4, 5
    found = work(seen, use("tied", a=1000, c=1000), use("in part", a=800, c=200), use("b", b=1000))
    chunks = {chunk.name: chunk for chunk in found.chunks}
    assert {name: chunk.gradient_from for name, chunk in chunks.items()} == {"tied": 5, "in part": 3, "b": 4}
    assert chunks["tied"].backward == chunks["in part"].backward == (3, 5)
    places = [chunk.name for chunk in found.chunks]
    gradients = dict(zip(places, gpu_kinds(found)["gradients"][:, 1].tolist(), strict=True))
    assert gradients["tied"] == [0, 0, 0, 0, 0, 2000] and gradients["in part"] == [0, 0, 0, 2000, 2000, 2000]
    with pytest.raises(SpecError, match=r"gradient_from=6 must be in backward=\(3, 5\)"):
        replace(chunks["tied"], gradient_from=6)


def test_a_gradient_is_whole_while_ranks_sum_it() -> None:
    """The next unit's backward hides the sum; a norm's is too short to."""
    seen = trace("a", "b", "norm", "c")  # backward: c, norm, b, a in 4, 5, 6, 7
    chunks = [use("a", ranks=4, a=4000), use("b", ranks=4, b=4000, norm=10), use("c", ranks=4, c=4000)]
    found = work(seen, *chunks, stage=2, data_ranks=4, regime=replace(A, gradient=4))
    assert found.light_timesteps == {2, 5}
    in_device, on_host = (dict(zip("abc", gpu_kinds(found)["gradients"][:, i].tolist(), strict=True)) for i in (0, 1))
    assert on_host["c"] == [0, 0, 0, 0, 16_000, 20_000, 20_000, 0]
    assert on_host["b"] == [0, 0, 0, 0, 0, 16_000, 16_000, 20_000]
    assert in_device["c"] == [0, 0, 0, 0, 16_000, 20_000, 20_000, 4000]
    several = gpu_kinds(replace(found, accumulation=4))["gradients"]  # with the sum of earlier micro-steps
    assert several[2, 0].tolist() == [4000, 4000, 4000, 4000, 20_000, 24_000, 24_000, 4000]
    assert several[2, 1].tolist() == [0, 0, 0, 0, 20_000, 20_000, 20_000, 0]
    whole = gpu_kinds(replace(found, accumulation=4, stage=1))["gradients"]
    assert whole[2, 1].tolist() == [16_000, 16_000, 16_000, 16_000, 16_000, 20_000, 20_000, 16_000]
    assert several[0, 1].tolist() == [20_000, 0, 0, 0, 0, 0, 0, 20_000]  # in the forward of the next micro-step
    alone = work(seen, *(replace(one, gathered_elems=one.elems) for one in chunks))
    assert gpu_kinds(alone)["gradients"][2, 1].tolist() == [0, 0, 0, 0, 2000, 2000, 0, 0]


def test_a_gradient_waits_for_those_that_are_reduced_before_it() -> None:
    """All ranks reduce chunks from the model's last to its first, in whatever order backward reaches them."""
    seen = trace("a", "b", "c")  # backward: c, b, a in 3, 4, 5

    def reduced(ranks: int = 2, **places: int) -> dict[str, int | None]:
        chunks = [replace(use(unit, ranks=ranks, **{unit: 1000}), place=place) for unit, place in places.items()]
        return {chunk.name: chunk.reduced_in for chunk in work(seen, *chunks).chunks}

    assert reduced(a=0, b=1, c=2) == {"a": 5, "b": 4, "c": 3}
    assert reduced(c=0, b=1, a=2) == {"a": 5, "b": 5, "c": 5}
    assert reduced(b=0, c=1, a=2) == {"a": 5, "b": 5, "c": 5}
    assert reduced(a=0, c=1, b=2) == {"a": 5, "b": 4, "c": 4}
    assert reduced(a=0, b=1, c=2, gone=3) == {"a": 5, "b": 5, "c": 5, "gone": 5}  # no backward reaches a unit of that
    found = work(seen, *(replace(use(unit, ranks=2, **{unit: 1000}), place=-i) for i, unit in enumerate("abc")))
    assert [row.tolist() for row in gpu_kinds(found)["gradients"][:, 1]] == [
        [0, 0, 0, 0, 0, 4000],
        [0, 0, 0, 0, 4000, 4000],
        [0, 0, 0, 4000, 4000, 4000],
    ]
    assert reduced(ranks=1, c=0, b=1, a=2) == {"a": 5, "b": 4, "c": 3}  # one rank has none to agree with
    assert reduced(ranks=1, a=0, b=1, c=2, gone=3) == {"a": 5, "b": 4, "c": 3, "gone": 5}
    with pytest.raises(SpecError, match=r"reduced_in=3 is before the end of \(5, 5\)"):
        replace(found.chunks[0], reduced_in=3)


def test_unused_frozen_and_forward_only_chunks_have_a_place() -> None:
    forward_only = [
        timestep(0, "a", backward=False),
        timestep(1, "b", backward=False),
        timestep(2, "b", backward=True),
    ]
    found = work(
        Trace(timesteps=tuple(forward_only)),
        use("first", a=1000),
        use("second", b=1000),
        use("never", gone=1000),
        use("frozen", a=1000, trainable=False),
    )
    chunks = {chunk.name: chunk for chunk in found.chunks}
    assert chunks["never"].visits == () and gather_windows(chunks["never"], found) == ()
    assert chunks["never"].forward_seconds == chunks["never"].backward_seconds == 0
    assert chunks["first"].visits == ((0, 0),) and chunks["first"].backward == (2, 2)
    made = cpu(found, EMULATED)
    assert {(c.name, c.state) for c in made.chunks} >= {("never", "host"), ("frozen", "none")}
    assert made.peak_host_bytes == 14 * 3000 + 2 * 1000
    assert sum(c.forward_seconds + c.backward_seconds for c in found.chunks) == 3.0


def test_no_second_is_lost() -> None:
    found = work(trace("none", "a", "other", "b"), use("x", a=7), use("y", b=7))
    assert sum(chunk.forward_seconds for chunk in found.chunks) == pytest.approx(4)
    assert sum(chunk.backward_seconds for chunk in found.chunks) == pytest.approx(4)


def test_half_a_step_is_refused() -> None:
    with pytest.raises(SpecError, match="0 of backward"):
        work(Trace(timesteps=(timestep(0, "a", backward=False),)), use("x", a=1))


def layer(name: str, kept: int, seconds: float, first: int, last: int, before: int = 0) -> TracedLayer:
    return TracedLayer(name=name, kept_bytes=kept, seconds=seconds, first=first, last=last, before_bytes=before)


def test_layers_are_recomputed_or_kept() -> None:
    layers = (layer("a", 60, 0.5, 0, 4), layer("b", 60, 0.3, 1, 3, before=90), layer("c", 50, 0.2, 2, 2))
    found = work(replace(trace("a", "b", "c"), layers=layers), use("x", a=7), use("y", b=7), use("z", c=7))
    # alike are alike, and what was recomputed in a backward is no part of what it takes without
    assert [x.recompute_seconds for x in found.layers] == pytest.approx([0.4, 0.4, 0.2])
    assert [chunk.backward_seconds for chunk in found.chunks] == pytest.approx([0.6, 0.6, 0.8])
    assert [chunk.forward_seconds for chunk in found.chunks] == [1, 1, 1]
    # 90 bytes were alive in the timestep of 104 before the 60 were there again
    assert layer_bytes(found)[:, 1].tolist() == [
        [60, 60, 60, 60, 60, 0],
        [0, 60, 60, 60, 90 + 60 - 104, 0],
        [0, 0, 50, 0, 0, 0],
    ]
    assert not layer_bytes(found)[:, 0].any()
    roomy, none = cuda(found, EMULATED, kept=["a", "b", "c"]), cuda(found, EMULATED)
    spent = [{t.phase: t.seconds for t in made.terms if t.name == "compute"}["backward"] for made in (none, roomy)]
    assert spent == pytest.approx([3, 2])
    assert roomy.gpu_bytes[3] == none.gpu_bytes[3] + 120
    assert on_device(found, EMULATED).layers == roomy.layers


def test_attention_that_is_dearer_than_the_rest_may_be_kept_alone() -> None:
    dear = replace(layer("a", 60, 0.5, 0, 4, before=70), attention_bytes=10, attention_seconds=0.2)
    cheap = replace(layer("b", 50, 0.5, 1, 3), attention_bytes=10, attention_seconds=0.1)
    found = work(replace(trace("a", "b", "c"), layers=(dear, cheap)), use("x", a=7), use("y", b=7), use("z", c=7))
    assert [x.name for x in found.layers] == ["a", "b", "attention of a"]
    assert [x.kept_bytes for x in found.layers] == [50, 50, 10]
    assert [x.recompute_seconds for x in found.layers] == pytest.approx([0.3, 0.5, 0.2])
    assert found.layers[0].own_bytes + found.layers[2].own_bytes == max(0, 70 + 60 - found.non_model_bytes[5])
    whole = work(
        replace(trace("a", "b", "c"), layers=(replace(dear, attention_bytes=0), cheap)),
        use("x", a=7),
        use("y", b=7),
        use("z", c=7),
    )
    both = layer_bytes(found)
    assert (both[0, 1] + both[2, 1] == layer_bytes(whole)[0, 1]).all()  # all of it kept is all of it kept


def test_a_kept_layer_counts_its_temporary_tensors_once() -> None:
    """Its forward without keeping peaks at 100 bytes; it begins at 40, leaves 50, and keeps 60 of which 30 are in that peak."""
    one = replace(layer("a", 60, 0.5, 0, 4), entered_bytes=40, forward_bytes=70)
    seen = trace("a", "b", "c")
    first = replace(seen.timesteps[0], non_model_bytes=100, left_bytes=50)
    seen = replace(seen, timesteps=(first, *seen.timesteps[1:]))

    def added(*layers: TracedLayer) -> list[float]:
        found = work(replace(seen, layers=layers), use("x", a=7), use("y", b=7), use("z", c=7))
        return [float(each) for each in layer_bytes(found)[:, 1, 0]]

    assert added(one) == [50 + 60 + 10 - 100]  # what is left, what is kept, and an output beside what it was made of
    assert added(replace(one, forward_bytes=95)) == [40 + 95 - 100]
    assert added(replace(one, forward_bytes=30, entered_bytes=50)) == [50 + 60 - 100]
    assert added(replace(one, forward_bytes=None)) == [60]  # traced before that was measured
    assert added(replace(one, forward_bytes=300)) == [60]
    assert added(one, replace(one, name="b")) == [60, 60]  # one runs beside what the other keeps


def test_on_the_device_as_many_are_kept_as_fit() -> None:
    layers = tuple(layer(unit, 60, 0.5, i, 4 - i) for i, unit in enumerate("abc"))
    found = work(replace(trace("a", "b", "c"), layers=layers), use("x", a=7, b=7, c=7))
    # the later are there for a shorter time
    peaks = [cuda(found, EMULATED, kept=kept).peak_gpu_bytes for kept in ("", "c", "bc", "abc")]
    assert len(set(peaks)) > 2
    for limit in (*peaks, *(peak - 1 for peak in peaks if peak > peaks[0])):
        made = on_device(found, EMULATED, Limits(gpu_bytes=limit))
        count = sum(peak <= limit for peak in peaks) - 1
        assert [x.name for x in made.layers if x.kept] == list("abc"[3 - count :])
    with pytest.raises(MemoryPlanError, match="cuda"):
        on_device(found, EMULATED, Limits(gpu_bytes=peaks[0] - 1))
    made = on_device(found, EMULATED, Limits(gpu_bytes=peaks[1]))
    assert "layers (1 of 3 kept)  activations  bytes  seconds to recompute" in str(made)
    assert "c                     kept         60 B   0.5 saved" in str(made)


# -- what our executor does -------------------------------------------------------------------------------------------


def test_stages_1_and_2_keep_parameters_on_the_device() -> None:
    chunks = [use("x", ranks=4, a=4000), use("y", ranks=4, b=4000)]
    found = work(trace("a", "b"), *chunks, stage=2, data_ranks=4, regime=replace(A, gradient=4))
    for made in (
        cpu(found, EMULATED),
        static(found, EMULATED, offload_optim_frac=1.0, offload_param_frac=1.0),
    ):
        assert {(c.state, c.parameters) for c in made.chunks} == {("host", "gpu")}
        # parameters whole, two gradients whole in float32, and the sum of the first, which ranks make meanwhile
        assert made.gpu_bytes[-1] == 2 * 2 * 4000 + 2 * 4 * 4000 + 4 * 1000 + 103
        assert made.gpu_bytes[0] == 2 * 2 * 4000 + 100
    on_device = cuda(found, EMULATED)
    assert on_device.gpu_bytes[0] == 2 * 2 * 4000 + 10 * 2000 + 100
    terms = {(term.phase, term.name): term.seconds for term in on_device.terms}
    gathered = 2 * 8000 * 3 / 4 / EMULATED.collective
    assert terms["forward", "collectives"] == pytest.approx(gathered)  # once, when they were stepped
    assert terms["backward", "collectives"] == pytest.approx(2 * gathered)  # gradients of 4 bytes


def test_the_sum_over_micro_steps_is_kept_or_fetched() -> None:
    one = work(trace("a", "b"), use("x", a=1000), use("y", b=1000))
    four = replace(one, accumulation=4, regime=replace(A, gradient=4))
    kept = gpu_kinds(four)["gradients"]
    assert kept[:, 0].tolist() == [[4000, 4000, 4000, 8000], [4000, 4000, 8000, 4000]]
    assert kept[:, 2].tolist() == [[0, 0, 0, 8000], [0, 0, 8000, 4000]]
    alone, all_ = cpu(one, EMULATED), cpu(four, EMULATED)
    weights = {name: weight for name, weight, _ in all_.phases}
    assert weights == {"forward": 1, "backward": 1, "later forwards": 3, "later backwards": 3}
    assert all_.seconds == pytest.approx(sum(weight * seconds for _, weight, seconds in all_.phases))
    assert all_.seconds > alone.seconds
    assert "later forwards (×3)" in str(all_)


def test_ranks_of_a_host_add_up() -> None:
    one = work(trace("a", "b"), use("x", a=1000), use("y", b=1000), host_base_bytes=77)
    four = replace(one, ranks_per_host=4)
    assert cpu(four, EMULATED).peak_host_bytes == 4 * cpu(one, EMULATED).peak_host_bytes
    assert cpu(four, EMULATED).peak_gpu_bytes == cpu(one, EMULATED).peak_gpu_bytes


def test_strategies_can_be_restricted() -> None:
    found = work(trace("a", "b"), use("x", a=1000), use("y", b=1000))
    assert cpu(found, EMULATED).strategy == "just_in_time_split"
    copied = replace(found, strategies=("out_of_place",))
    assert cpu(copied, EMULATED).strategy == plan(copied, EMULATED).strategy == "out_of_place"
    for wrong in ((), ("none",), ("sometimes",)):
        with pytest.raises(SpecError, match="strategies"):
            replace(found, strategies=wrong)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 2]), st.integers(0, 2**30))
def test_plans_of_traces_are_the_best(stage: int, accumulation: int, ranks: int, seed: int) -> None:
    sizes = torch.randint(1000, 90000, (4,), generator=torch.Generator().manual_seed(seed)).tolist()
    units = ["a", "b", "c", "d"]
    chunks = [
        use(unit, elems, ranks, **{unit: elems, units[seed % 4]: 10}) for unit, elems in zip(units, sizes, strict=True)
    ]
    found = work(trace(*units), *chunks, stage=stage, accumulation=accumulation, data_ranks=ranks)
    machine = replace(EMULATED, gpu_bytes=int(sum(sizes) * 9 * ranks**0.5))
    best, made = exhaustive(found, machine), plan(found, machine)
    assert made.seconds == pytest.approx(best.seconds, rel=0.02)
    assert made.peak_gpu_bytes <= machine.gpu_bytes
    if stage < 3:
        assert {chunk.parameters for chunk in made.chunks} == {"gpu"}


def test_chunks_of_a_model() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
    model[2].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    found = {chunk.name: chunk for chunk in chunk_uses(model, Mesh(dict(data=2), rank=0), dtype=torch.bfloat16)}
    assert set(found) == {"0.weight", "1.bias"}
    assert dict(found["0.weight"].units) == {"0": 72, "1": 64, "2": 64}
    assert not found["1.bias"].trainable
    assert found["0.weight"].gathered_elems >= 64 + 8 + 64
