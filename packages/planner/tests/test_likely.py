"""Likely profiles of mixtures, and what a search expects of layouts that it does not trace."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from meshfold.mesh import MeshfoldError, ParallelSpec
from meshfold.models import Llama, MoELlamaConfig
from meshfold.planner import MACHINES, Machine
from meshfold.planner.efficiency import Launches
from meshfold.planner.estimates import StepSpeed
from meshfold.planner.suggestions import (
    Candidate,
    Clock,
    Family,
    Option,
    Outlook,
    candidates,
    families,
    outlook_of,
    search,
)
from meshfold.planner.suggestions.findings import Findings
from meshfold.planner.suggestions.likely import Likely
from meshfold.planner.suggestions.profile import Profile
from meshfold.planner.suggestions.profiler import Profiler

CONFIG = MoELlamaConfig(
    vocab_size=512, hidden=256, layers=3, heads=4, kv_heads=2, ffn=512, experts=4, top_k=2, max_positions=128
)
SEQ_LEN, BATCH = 128, 8


def mixture() -> nn.Module:
    return Llama(CONFIG)


def machine(memory: float = 79.0) -> Machine:
    """An H100 with short launches and latencies, as if the model were large."""
    return replace(MACHINES["h100x8"], memory=memory * 2**30, launches=Launches.of_all(0.5e-6), latency=1e-6)


@lru_cache
def profiler() -> Profiler:
    return Profiler(
        build=mixture,
        seq_len=SEQ_LEN,
        batch_size=BATCH,
        settings=dict(precision="bf16", rules=None, kernels="auto", clip_grad_norm=1.0),
        optimizer="adamw",
    )


def likely_and_traced(parallel: dict[str, Any]) -> tuple[Profile, Profile]:
    spec = ParallelSpec.parse(parallel)
    likely = Likely(profiler().of(ParallelSpec.parse({}, 1)), SEQ_LEN, 2)
    return likely.of(Family(spec=spec)), profiler().of(replace(spec, data=spec.axes["data"]))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "parallel",
    [
        dict(data=4, expert=4),
        dict(data=2, expert=2),
        dict(data=2, tensor=2, expert=4),
        dict(data=2, sequence=dict(mode="ulysses", size=2), expert=2),
        pytest.param(dict(data=4, sequence=dict(mode="ring", size=2), expert=4), marks=pytest.mark.slow),
        pytest.param(dict(tensor=dict(mode="1d", size=2, attention="tokens"), expert=2), marks=pytest.mark.slow),
        pytest.param(dict(tensor=dict(mode="2d", size=4), expert=4), marks=pytest.mark.slow),
        pytest.param(dict(sequence=dict(mode="megatron"), tensor=2, expert=2), marks=pytest.mark.slow),
    ],
)
def test_likely_messages_and_bytes_of_a_mixture_are_the_least(parallel: dict[str, Any]) -> None:
    """Tokens to experts were left out, a sum for an MLP that mixtures lack was in, and experts were divided by tensor ranks too."""
    likely, traced = likely_and_traced(parallel)
    rows = max(likely.block.steps)
    least, sent = (
        one.block.at(rows, lambda step: sum(size for size, _ in step.messages.values())) for one in (likely, traced)
    )
    assert 0.5 * sent <= least <= 1.001 * sent
    elements = traced.block.elements  # attention by tokens has whole weights on every rank
    assert 0.85 * elements <= likely.block.elements <= elements


def test_a_mixture_without_experts_of_its_ranks_computes_them_whole() -> None:
    likely, traced = likely_and_traced(dict(tensor=2))
    rows = max(likely.block.steps)
    flop, real = (one.block.steps[rows].forward.flop for one in (likely, traced))
    assert flop == pytest.approx(real, rel=0.02)


def family(**parallel: Any) -> Family:
    return Family(spec=ParallelSpec.parse(parallel))


def outlook(seconds: float) -> Outlook:
    none = dict.fromkeys(("waits", "idle", "hidden", "shown", "optimizer", "offload", "state"), 0.0)
    return Outlook(seconds=seconds, compute=seconds, memory=1.0, **none)


def expecting(*every: Family) -> Findings:
    found = Findings()
    for one in every:
        found.expected[str(one.spec.to_dict())] = Candidate(family=one, spec=one.spec), outlook(1.0)
    return found


def test_a_traced_layout_speaks_for_those_with_the_same_kinds_of_split() -> None:
    """Only families of a single kind were learnt from: every grid of a sequence, a tensor mode and experts was traced."""
    ring = dict(mode="ring", size=2)
    first, second = family(sequence=ring, tensor=4, expert=2), family(sequence=ring, tensor=2, expert=4)
    other = family(sequence=dict(mode="ulysses", size=2), tensor=2, expert=4)
    found = expecting(first, second, other)
    before = [found.likely_seconds(one) for one in (second, other)]
    found.note_traced(first, Candidate(family=first, spec=first.spec), outlook(1.3))
    assert before[0] == before[1] < 1.0
    assert found.likely_seconds(second) == pytest.approx(1.3)
    assert found.likely_seconds(other) == before[1]


def test_kinds_alone_speak_for_splits_that_have_several() -> None:
    ring = dict(mode="ring", size=2)
    both, alone = family(sequence=ring, expert=2), family(sequence=ring)
    found = expecting(both, alone)
    found.note_traced(alone, Candidate(family=alone, spec=alone.spec), outlook(1.2))
    assert found.likely_seconds(both) == pytest.approx(1.2)


def test_what_little_memory_takes_longer_is_not_expected_of_others() -> None:
    """The expected candidate does not fit, and the best that does repeats its blocks: another size may fit without."""
    first, second = family(tensor=4, expert=2), family(tensor=2, expert=2)
    found = expecting(first, second)
    found.note_traced(first, Candidate(family=first, spec=first.spec), outlook(1.4), alike=outlook(1.05))
    assert found.likely_seconds(second) == pytest.approx(1.05)


@pytest.mark.parametrize("host", [0, 1])
def test_a_pipeline_with_state_on_the_host_speaks_for_others(host: int) -> None:
    """Their outlooks are short alike: eight were planned in full, one after the other, before a faster spec without stages."""
    made, other = (
        family(pipeline=2, sequence=dict(mode=mode, size=2), zero=dict(stage=3)) for mode in ("ring", "ulysses")
    )
    candidate = Candidate(family=made, spec=made.spec)
    plan: Any = SimpleNamespace(memory=SimpleNamespace(host=host, total=1), pipeline=None)
    speed = StepSpeed(seconds=1.14, tokens_per_second=1.0, mfu=0.5)
    found = Findings()
    found.note_planned(Option(candidate=candidate, found=plan, speed=speed, outlook=outlook(1.0), misfit=""))
    assert found.hosted_ratio(Candidate(family=other, spec=other.spec)) == (1.14 if host else 1.0)


@pytest.mark.slow
@pytest.mark.timeout(900)  # every layout is traced
@pytest.mark.parametrize(("ranks", "memory"), [(2, 79.0), (4, 0.1)])
def test_the_search_misses_no_layout_of_a_mixture(ranks: int, memory: float) -> None:
    """Against the outlooks of every family; with room, and where state fits only if ranks share it."""
    on = machine(memory)
    given = dict(fp8=None, optimizer="adamw", rules=None, kernels="auto", clip=True, name="mixture")
    searching = search.Search(
        build=mixture,
        machine=on,
        ranks=ranks,
        batch_size=BATCH,
        seq_len=SEQ_LEN,
        precision="bf16",
        settings=given,
        accumulate=None,
        options=2,
        most=8,
    )
    searching.run()
    clock = Clock(machine=on, batch_size=BATCH, precision="bf16", optimizer="adamw", clip=True)
    known: dict[str, float] = {}
    for one in families(ranks, BATCH, SEQ_LEN, blocks=3, heads=4, experts=4):
        try:
            profile = profiler().of(one.layout)
        except MeshfoldError:
            continue
        for candidate in candidates(one, BATCH, blocks=3):
            expected = outlook_of(clock, candidate, profile)
            if searching.can_fit(candidate, expected, 1.0):
                key = str(one.spec.to_dict())
                known[key] = min(expected.seconds, known.get(key, float("inf")))
    best = min(known, key=lambda key: known[key])
    found = min(seen.seconds for _, seen in searching.found.nearest.values())
    assert found <= 1.03 * known[best], best
