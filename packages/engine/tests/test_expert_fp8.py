"""Tokens travel to the experts of other ranks in fp8 where ``precision`` says so."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from meshfold.mesh import SpecError, record
from meshfold.mesh.testing import run_on_ranks

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
from expert_cases import batches, engine_of

FP8: dict[str, Any] = dict(name="bf16", matmul="fp8", keep=("blocks", "head"))


def in_fp8(parallel: dict[str, Any]) -> tuple[list[float], list[float], int, int]:
    """Losses with tokens in bf16 and in fp8, and the bytes of rows that are sent in a step."""
    found: list[Any] = []
    for precision in ("bf16", {**FP8, "dispatch": "fp8"}):
        with engine_of(parallel, "unbalanced", precision=precision) as engine:
            losses = [engine.train_step(engine.shard_batch(batch)) for batch in batches(2)]
            with record() as log:
                engine.train_step(engine.shard_batch(batches(1)[0]))
            found += [losses, sum(entry.bytes for entry in log.entries if entry.kind == "exchange_rows")]
    return found[0], found[2], found[1], found[3]


def test_tokens_travel_in_fp8_if_precision_says_so() -> None:
    wide, narrow, sent, less = run_on_ranks(2, in_fp8, dict(data=2, expert=dict(size=2, exchange="all_to_all")))[0]
    assert narrow != wide and narrow == pytest.approx(wide, rel=2e-2)
    assert less < 0.9 * sent


def test_fp8_dispatch_is_refused_where_no_token_travels() -> None:
    with pytest.raises(SpecError, match=r"no token travels .* Write expert=dict\(size=2\) in the spec"):
        engine_of({}, precision={**FP8, "dispatch": "fp8"})
    with pytest.raises(SpecError, match="dispatch='int8': write 'fp8'"):
        engine_of({}, precision={**FP8, "dispatch": "int8"})
    with pytest.raises(SpecError, match="dispatch without matmul: add matmul='fp8'"):
        engine_of({}, precision=dict(name="bf16", dispatch="fp8"))
