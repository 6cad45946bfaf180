"""``overlap="auto"`` in mode 1d: the plan says whether attention is faster by heads or by tokens, and why."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from meshfold.mesh import ParallelSpec, SpecError
from meshfold.models import build
from meshfold.planner import AttentionChoice, Estimate, choose_attention, choose_spec, estimate, find_machine

AUTO: dict[str, Any] = dict(mode="1d", size=4, overlap="auto")


def choice(
    parallel: dict[str, Any], rows: int, length: int = 64, **given: Any
) -> tuple[AttentionChoice | None, Estimate]:
    sizes = dict(hidden=512, layers=2, heads=8, kv_heads=2, ffn=512, vocab_size=64, max_positions=length) | given
    machine = find_machine("h200x8")

    def again(spec: ParallelSpec) -> Estimate:
        return estimate(
            partial(build, "llama-tiny", **sizes),
            spec,
            batch_size=rows,
            seq_len=length,
            precision="bf16",
            machine=machine,
        )

    found = again(ParallelSpec.parse(parallel, 4))
    return choose_attention(found, machine, "bf16", again), found


def test_many_tokens_are_exchanged_for_heads() -> None:
    chosen, found = choice(dict(tensor=AUTO), rows=4096)
    assert chosen is not None and chosen.by_tokens and chosen.found is not None
    assert chosen.found.critical < found.critical and chosen.found.hideable > found.hideable
    assert chosen.why.startswith("attention by tokens is faster: products wait for ")
    assert str(chosen) == f"{chosen.why}. Write tensor=dict(mode='1d', size=4, overlap='auto', attention='tokens')"
    assert chosen.tensor == {**AUTO, "attention": "tokens"}
    assert chosen.found.spec.tensor is not None and chosen.found.spec.tensor.attention == "tokens"


def test_with_few_tokens_gradients_of_whole_weights_take_longer() -> None:
    chosen, found = choice(dict(tensor=AUTO), rows=8)
    assert chosen is not None and not chosen.by_tokens and chosen.found is not None
    assert chosen.found.critical < found.critical
    assert chosen.why.startswith("attention by heads, not by tokens, where products wait for ")


def test_what_cannot_be_is_named() -> None:
    _, found = choice(dict(tensor=AUTO), rows=4)

    def refuses(spec: ParallelSpec) -> Estimate:
        raise SpecError("no heads")

    chosen = choose_attention(found, find_machine("h200x8"), "bf16", refuses)
    assert chosen == AttentionChoice(
        by_tokens=False, why="attention by heads: by tokens is refused: no heads", found=None
    )


@pytest.mark.parametrize(
    "parallel",
    [
        dict(tensor=4),
        dict(tensor={**AUTO, "attention": "tokens"}),
        dict(tensor={**AUTO, "attention": "heads"}),
        dict(tensor=dict(mode="2d", size=4, overlap="auto")),
    ],
)
def test_other_specs_leave_nothing_to_choose(parallel: dict[str, Any]) -> None:
    spec = ParallelSpec.parse(parallel, 4)
    given: Any = type("Found", (), {"spec": spec, "world_size": 4})()
    assert choose_attention(given, find_machine("h200x8"), "bf16", lambda _: pytest.fail("estimated again")) is None
    assert choose_spec(lambda: pytest.fail("built"), parallel, 4, batch_size=4, seq_len=64) == spec


@pytest.mark.parametrize(("rows", "attention"), [(4096, "tokens"), (8, "heads")])
def test_the_spec_for_an_engine_has_the_choice_of_the_plan_and_its_reason(rows: int, attention: str) -> None:
    sizes = dict(hidden=512, layers=2, heads=8, kv_heads=2, ffn=512, vocab_size=64, max_positions=64)
    make = partial(build, "llama-tiny", **sizes)
    asked: dict[str, Any] = dict(batch_size=rows, seq_len=64, precision="bf16", machine=find_machine("h200x8"))
    spec = choose_spec(make, dict(tensor=AUTO), 4, **asked)
    planned, _ = choice(dict(tensor=AUTO), rows)
    assert planned is not None and spec.tensor is not None
    assert spec == ParallelSpec.parse(dict(tensor={**AUTO, "attention": attention}), 4)
    assert spec.tensor.chosen == planned.why
    assert choose_spec(make, spec, 4, **asked) == spec, "a choice that was made stands"
