"""Engine(cuda_graph=True) under zero: a step is captured in segments, and its replays make the same moves of chunks.

On a CPU segments are recorded operators (:mod:`recorded_segments`). Tests on a GPU capture graphs.
"""

from __future__ import annotations

import gc
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from packages.engine.tests.recorded_segments import RecordedSegments, recorded
from torch import Tensor, nn

from meshfold.engine import Engine
from meshfold.engine.zero.captured_step import CaptureReport
from meshfold.mesh import SpecError
from meshfold.models import GPT, GPTConfig
from meshfold.zero_gemini import ChunkPlacement
from meshfold.zero_gemini.sharded_model import chunked_model
from meshfold.zero_gemini.sharded_model.build import lay_out_parameters

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


def run(
    work: list[Any], *, cuda_graph: bool, spreads: bool = False, speculative: bool = False, **settings: Any
) -> tuple[list[float], list[Tensor], CaptureReport | None]:
    """Losses and norms of a run, its weights, and what was captured."""
    with engine_of(gpt(), cuda_graph=cuda_graph, **settings) as engine:
        if spreads:
            spread(engine)
        if speculative:
            assert engine.states.gemini.step_speculatively(True)
        found = []
        for batch in work:
            found.append(engine.train_step(batch))
            assert engine.last is not None
            found.append(engine.last.grad_norm or 0.0)
        weights = [value.clone() for value in engine.full_state_dict().values()]
        return found, weights, engine.capture


@pytest.mark.parametrize("spreads", [False, True])
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_replays_train_as_eager_steps(monkeypatch: pytest.MonkeyPatch, precision: str, spreads: bool) -> None:
    """Losses, norms and weights to the bit, for chunks on the host, on the device, and with only their state on the host."""
    work = batches(7)
    settings: dict[str, Any] = dict(precision=precision, spreads=spreads)
    with recorded(monkeypatch) as made:
        captured = run(work, cuda_graph=True, **settings)
        eager = run(work, cuda_graph=False, **settings)
    assert captured[0] == eager[0] and not any(map(math.isnan, captured[0]))
    assert all(map(torch.equal, captured[1], eager[1]))
    report = captured[2]
    assert report is not None and (report.captures, report.replays, report.why_eager) == (1, 5, "")
    assert report.graphs > 8 and len(made) == 1 and eager[2] is None
