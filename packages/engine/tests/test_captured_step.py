"""Engine(cuda_graph=True): replayed micro-steps train as others do. A CPU tests inputs, gradients and forms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.engine import Engine, TrainingError
from meshfold.engine.captured_step import MOST_GRAPHS
from meshfold.mesh import SpecError
from meshfold.mesh.testing import ranks
from meshfold.models import GPT, GPTConfig

WORDS, LENGTH = 48, 16


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=WORDS, hidden=32, layers=2, heads=4, max_positions=LENGTH))


class Branching(nn.Module):
    """Uses one of two layers, by the shape of its input; targets are classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head((self.first if x.shape[0] == 2 else self.second)(x))
        return out


def batches(count: int, *, rank: int = 0) -> list[dict[str, Tensor]]:
    """Batches of two lengths by turns, with different numbers of targets that count."""
    generator = torch.Generator().manual_seed(3 + rank)
    made = []
    for number in range(count):
        ids = torch.randint(WORDS, (2, (8, 12)[number % 2]), generator=generator)
        labels = ids.clone()
        labels[0, : 1 + (number + 3 * rank) % 6] = -100
        made.append(dict(input_ids=ids, labels=labels))
    return made


def trained(model: nn.Module, work: list[Any], parallel: dict[str, Any], **settings: Any) -> tuple[list[float], Engine]:
    """Losses and norms of a run, and its engine."""
    engine = Engine(model, parallel, optimizer=dict(name="adamw", lr=1e-2), clip_grad_norm=1.0, **settings)
    found = []
    for batch in work:
        found.append(engine.train_step(batch))
        assert engine.last is not None
        found.append(engine.last.grad_norm or 0.0)
    return found, engine


@pytest.mark.few(2)
@pytest.mark.parametrize("precision", ["fp64", "bf16", "fp16"])
def test_replayed_steps_are_those_of_a_plain_run(precision: str) -> None:
    """Two lengths, two micro-steps a step, unequal targets, a tied head: losses, norms and weights to the bit."""
    results = []
    for cuda_graph in (False, True):
        found, engine = trained(
            gpt(), batches(16), dict(data=1), precision=precision, gradient_accumulation=2, cuda_graph=cuda_graph
        )
        results.append((found, [parameter.detach().clone() for parameter in engine.model.parameters()]))
        engine.close()
    assert results[0][0] == results[1][0] and not any(math.isnan(each) for each in results[0][0])
    for plain, replayed in zip(results[0][1], results[1][1], strict=True):
        assert torch.equal(plain, replayed)


def test_compiled_blocks_are_replayed() -> None:
    """A U-Net has thousands of kernels also when it is compiled: launching them takes longer than running them."""
    results = []
    for settings in (dict(), dict(cuda_graph=True, compile=dict(backend="eager"))):
        found, engine = trained(gpt(), batches(10)[::2], dict(data=1), precision="fp64", **settings)
        results.append(found)
        engine.close()
    assert results[0] == results[1]


def test_inputs_are_copied_and_not_remembered() -> None:
    """A replay with other values gives another loss than the captured batch: nothing of the capture is left in it."""
    work = [dict(input_ids=torch.full((2, 8), word)) for word in (1, 1, 1, 1, 2)]
    found, engine = trained(gpt(), work, dict(data=1), cuda_graph=True)
    engine.close()
    plain, engine = trained(gpt(), work, dict(data=1))
    engine.close()
    assert found == plain and abs(found[-2] - found[-4]) > 1e-3


def test_parameters_that_only_some_batches_use() -> None:
    """Gradients of both forms are added up in a step, whichever parameters they reach; an unused one keeps None."""
    generator = torch.Generator().manual_seed(1)
    sizes = [2, 3] * 5 + [2, 2, 3, 3]
    work = [
        (torch.randn(rows, 4, generator=generator), torch.randint(3, (rows,), generator=generator)) for rows in sizes
    ]
    results = []
    for cuda_graph in (False, True):
        found, engine = trained(
            Branching(),
            work,
            dict(data=1),
            precision="fp64",
            gradient_accumulation=2,
            loss_fn=lambda output, batch: F.cross_entropy(output, batch[1]),
            cuda_graph=cuda_graph,
        )
        state = engine.optimizer.state  # type: ignore[union-attr]
        results.append((found, [float(each["step"]) for each in state.values()]))
        engine.close()
    assert results[0] == results[1]


def test_a_loop_of_ones_own_between_replays() -> None:
    """engine.backward adds to the gradients of a replay in the same step, and steps after it are right too."""

    def run(cuda_graph: bool) -> list[float]:
        with Engine(gpt(), optimizer=dict(name="sgd", lr=0.1), precision="fp64", cuda_graph=cuda_graph) as engine:
            found = []
            for number, batch in enumerate(batches(12)):
                found.append(engine.train_step(batch))
                if number % 4 == 3:
                    engine.backward(engine(**batch).loss)
                    engine.step()
            return [*found, *(float(p.detach().sum()) for p in engine.model.parameters())]

    assert run(False) == run(True)


def test_weights_that_moved_are_captured_again() -> None:
    """A parameter whose memory was replaced is not read at its old place."""
    work = batches(1) * 8
    with Engine(gpt(), optimizer=dict(name="sgd", lr=0.1), precision="fp64", cuda_graph=True) as engine:
        for batch in work:
            engine.train_step(batch)
        before = engine.runner._captured
        assert before is not None and len(before._graphs) == 1
        for parameter in engine.model.parameters():
            parameter.data = parameter.data.clone() * 0.5
        wanted = engine.eval_step(work[0])
        assert engine.train_step(work[0]) == pytest.approx(wanted, abs=1e-12)


def test_too_many_shapes_run_without_a_graph() -> None:
    """The ninth shape warns once and trains."""
    with Engine(gpt(), optimizer=dict(name="sgd", lr=0.1), cuda_graph=True) as engine:
        for length in range(2, 2 + MOST_GRAPHS):
            for _ in range(4):
                engine.train_step(torch.zeros(1, length, dtype=torch.int64))
        for _ in range(3):
            engine.train_step(torch.zeros(1, LENGTH - 1, dtype=torch.int64))
        with pytest.warns(UserWarning, match="another shape than the 8"):
            assert math.isfinite(engine.train_step(torch.zeros(1, LENGTH - 1, dtype=torch.int64)))


@ranks(2)
def test_data_ranks_with_different_numbers_of_targets() -> None:
    """Gradients are summed after the replay, weighted by each rank's targets."""
    rank, found = torch.distributed.get_rank(), []
    for cuda_graph in (False, True):
        losses, engine = trained(gpt(), batches(10, rank=rank), dict(data=2), precision="fp64", cuda_graph=cuda_graph)
        found.append([*losses, *(float(p.detach().sum()) for p in engine.model.parameters())])
        engine.close()
    assert found[0] == found[1]


@ranks(2)
def test_refused_under_zero_on_several_ranks() -> None:
    with pytest.raises(SpecError, match="cuda_graph=True under zero on 2 ranks: collectives are not captured"):
        Engine(gpt(), dict(data=2, zero=dict(stage=1)), optimizer=dict(name="adamw", lr=1e-3), cuda_graph=True)


@pytest.mark.parametrize(
    ("parallel", "settings", "words"),
    [
        (dict(tensor=dict(mode="1d", size=1)), {}, "cuda_graph=True under tensor"),
        (dict(data=1), dict(recompute="blocks"), "cuda_graph=True with recompute"),
        (dict(data=1), dict(cuda_graph="yes"), "cuda_graph='yes': True or False"),
    ],
)
def test_refused(parallel: dict[str, Any], settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        Engine(gpt(), parallel, optimizer=dict(name="adamw", lr=1e-3), **{"cuda_graph": True, **settings})


def test_dropout_is_refused() -> None:
    model = GPT(GPTConfig(vocab_size=WORDS, hidden=32, layers=1, heads=4, max_positions=LENGTH, dropout=0.1))
    with pytest.raises(
        SpecError, match=r"with dropout \(config.dropout=0.1\): a graph would drop the same elements in every step"
    ):
        Engine(model, optimizer=dict(name="adamw", lr=1e-3), cuda_graph=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a graph: needs a GPU")
def test_a_model_that_waits_for_the_device() -> None:
    class Waiting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float(x.sum())

    engine = Engine(
        Waiting(4, 4),
        optimizer=dict(name="sgd", lr=1e-3),
        loss_fn=lambda output, batch: output.square().mean(),
        cuda_graph=True,
    )
    work = (torch.ones(2, 4), torch.ones(2, 4))
    for _ in range(3):
        engine.train_step(work)
    with pytest.raises(TrainingError, match=r"cannot be captured: .* change the model, or leave cuda_graph out"):
        engine.train_step(work)
