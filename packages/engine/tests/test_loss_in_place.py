"""A loss inside of a model, the usual line on its logits: ranks compute it from their rows and words, and gather no logits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshfold.engine import Engine
from meshfold.mesh.testing import Operators, ranks
from meshfold.models import GPT, GPTConfig

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
from test_first_step_logits import IDS, LABELS, WORDS, small_chunks

Line = Callable[[Tensor, Tensor], Tensor]


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of a language model, as in transformers and nanoGPT, smoothed."""
    return F.cross_entropy(
        logits[..., :-1, :].contiguous().view(-1, logits.size(-1)).double(),
        labels[:, 1:].reshape(-1),
        ignore_index=-100,
        label_smoothing=0.1,
    )


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    total = F.cross_entropy(logits.flatten(0, 1) / 2, labels.flatten(), reduction="sum")
    return total / (labels != -100).sum()


def by_row(logits: Tensor, labels: Tensor) -> Tensor:
    """Each token's loss, weighted by its place."""
    each = F.cross_entropy(logits[:, 1:].flatten(0, 1), labels[:, :-1].flatten(), reduction="none")
    weights = torch.linspace(0.5, 1.5, each.numel(), dtype=each.dtype)
    return (each * weights).sum() / (labels[:, :-1] != -100).sum()


def by_class(logits: Tensor, labels: Tensor) -> Tensor:
    """A mean in which each word has a weight."""
    weights = torch.linspace(0.5, 1.5, logits.shape[-1], dtype=torch.float64)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), weights)


LINES: dict[str, Line] = {"shifted": shifted, "sum": summed, "none": by_row, "weights": by_class}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down_proj(self.up_proj(x).relu())
        return found


class Own(nn.Module):
    """A user's model."""

    def __init__(self, line: Line = shifted, words: int = WORDS, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(words, 16), nn.LayerNorm(16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, words)
        if tied:
            self.head.weight = self.embed.weight
        self.line = line

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if labels is None else dict(loss=self.line(logits, labels), logits=logits)


class Flat(Own):
    """Its head is given a rank's own rows, where other models' has them all."""

    flat_tokens = True


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = (
            p(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        found: Tensor = self.out_proj(y)
        return found


class AttentionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = nn.LayerNorm(16), Attention(), nn.LayerNorm(16), Block()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        found: Tensor = x + self.mlp(self.norm2(x))
        return found


class Attending(Own):
    """With attention, whose scores are fewer than half of the logits."""

    def __init__(self, line: Line = shifted, words: int = WORDS, tied: bool = False) -> None:
        super().__init__(line, words, tied)
        self.blocks = nn.ModuleList(AttentionBlock() for _ in range(2))


def check(
    make: Callable[[], nn.Module],
    parallel: dict[str, Any],
    most: int,
    *,
    rows: int = 4,
    length: int | None = None,
    loss_fn: Line | None = None,
) -> None:
    """Compare two steps and an evaluation with plain torch; ``most``: elements that a tensor may have."""
    ids, labels, rate = IDS[:rows, :length], LABELS[:rows, :length], 0.5
    batch: Any = dict(input_ids=ids, labels=labels)
    settings: dict[str, Any] = dict(precision="fp64", optimizer=dict(name="sgd", lr=rate), kernels=dict(loss=True))
    if loss_fn is not None:
        batch = (ids, labels)
        settings["loss_fn"] = lambda logits, batch: loss_fn(logits, batch[1])
    with small_chunks(), Engine(make, parallel, **settings) as engine:
        plain = make().double()
        plain.load_state_dict(engine.full_state_dict())
        with Operators() as seen:
            got = [engine.train_step(engine.shard_batch(batch)) for _ in range(2)]
            got.append(engine.eval_step(engine.shard_batch(batch)))
        weights = engine.full_state_dict()
    want = []
    for step in range(3):
        plain.zero_grad()
        if loss_fn is None:
            found = plain(ids, labels=labels)
            loss = found["loss"] if isinstance(found, dict) else found.loss
        else:
            loss = loss_fn(plain(ids), labels)
        want.append(loss.item())
        if step < 2:
            loss.backward()
            with torch.no_grad():
                for parameter in plain.parameters():
                    parameter -= rate * parameter.grad
    assert got == pytest.approx(want, rel=1e-9)
    for name, value in plain.state_dict().items():
        assert torch.allclose(weights[name], value, rtol=1e-9, atol=1e-12), name
    assert seen.largest <= most


CHUNK = 128 * (WORDS // 2 + 16)
"""Elements of a chunk of logits, where two ranks share the words."""
MEGATRON: dict[str, Any] = dict(tensor=2, sequence=dict(mode="megatron"))
FOUR: dict[str, dict[str, Any]] = {
    "2d": dict(tensor=dict(size=4, mode="2d")),
    "2.5d": dict(tensor=dict(size=4, mode="2.5d", depth=1)),
    "1d+sequence, pipeline": dict(**MEGATRON, pipeline=dict(size=2, microbatches=2)),
    "1d+sequence, data, zero": dict(**MEGATRON, data=2, zero=dict(stage=3)),
}
EIGHT: dict[str, dict[str, Any]] = {
    "3d": dict(tensor=dict(size=8, mode="3d")),
    "2.5d": dict(tensor=dict(size=8, mode="2.5d", depth=2)),
}
TIES = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


@ranks(2)
def test_rows_are_split() -> None:
    """The vocabulary cannot be shared evenly by ranks."""
    check(partial(Flat, shifted, WORDS + 1), MEGATRON, CHUNK)


@ranks(4)
def test_words_and_rows_are_split() -> None:
    """A batch of three is padded to four rows."""
    check(Own, FOUR["2d"], CHUNK, rows=3)


@ranks(4)
def test_a_tied_head() -> None:
    """Which would make partial sums of all words; and words have weights."""
    check(partial(Own, by_class, tied=True), FOUR["2d"], CHUNK)


class Checkpointed(Own):
    """Computes head and loss again in backward."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return dict(loss=checkpoint(lambda x, y: self.line(self.head(self.norm(x)), y), x, labels, use_reentrant=False))


@ranks(2)
def test_a_checkpointed_loss() -> None:
    check(Checkpointed, dict(tensor=2), CHUNK)


def with_its_own_loss(tie: bool = True) -> nn.Module:
    """A model whose loss is ours, which gets logits as a rank has them and not gathered ones."""
    sizes: dict[str, Any] = dict(hidden=16, layers=2, heads=4, vocab_size=WORDS + 1, max_positions=128)
    return GPT(GPTConfig(dropout=0.0, tie=tie, label_smoothing=0.1, z_loss=0.01, **sizes))


@ranks(4)
def test_a_tied_head_with_the_loss_of_our_models() -> None:
    check(with_its_own_loss, FOUR["2d"], CHUNK, rows=3)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["2.5d", "1d+sequence, pipeline"])
@ranks(4)
def test_the_loss_of_our_models_on_four_ranks(spec: str) -> None:
    check(with_its_own_loss, FOUR[spec], CHUNK)


@pytest.mark.slow
@TIES
@pytest.mark.parametrize("spec", EIGHT)
@ranks(8)
def test_the_loss_of_our_models_on_eight_ranks(spec: str, tied: bool) -> None:
    """The first step in 3d, which is looked at, makes partial sums: rows of logits are other ones than the head's."""
    check(partial(with_its_own_loss, tied), EIGHT[spec], 2 * CHUNK if spec == "3d" else CHUNK)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [MEGATRON, dict(tensor=2)], ids=str)
@pytest.mark.parametrize("line", LINES)
@ranks(2)
def test_two_ranks(line: str, spec: dict[str, Any]) -> None:
    check(partial(Own, LINES[line], WORDS + 1), spec, CHUNK)


@pytest.mark.slow
@ranks(2)
def test_attention_by_tokens() -> None:
    # Scores are the largest: 4 rows, 2 of 4 heads, 128 x 128.
    check(Attending, dict(tensor=dict(size=2, attention="tokens")), 2 * CHUNK)


@pytest.mark.slow
@TIES
@pytest.mark.parametrize("spec", FOUR)
@ranks(4)
def test_four_ranks(spec: str, tied: bool) -> None:
    check(partial(Own, shifted, WORDS + 1, tied), FOUR[spec], CHUNK)


@pytest.mark.slow
@TIES
@pytest.mark.parametrize("spec", EIGHT)
@ranks(8)
def test_eight_ranks(spec: str, tied: bool) -> None:
    check(partial(Own, by_row, WORDS + 3, tied), EIGHT[spec], CHUNK)


RING, ULYSSES = (dict(mode=mode, size=2) for mode in ("ring", "ulysses"))


@ranks(2)
def test_a_loss_of_whole_sequences() -> None:
    """A loss_fn where ranks share sequences, which are padded to 128 tokens."""
    check(Attending, dict(sequence=RING), 2 * CHUNK, length=127, loss_fn=by_row)


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in LINES if line != "weights"])  # whose mean is refused
@pytest.mark.parametrize("sequence", [RING, ULYSSES], ids=["ring", "ulysses"])
@ranks(2)
def test_whole_sequences(sequence: dict[str, Any], line: str) -> None:
    check(Attending, dict(sequence=sequence), 2 * CHUNK, loss_fn=LINES[line])


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [RING, ULYSSES], ids=["ring", "ulysses"])
@ranks(4)
def test_whole_sequences_in_1d(sequence: dict[str, Any]) -> None:
    check(Attending, dict(tensor=2, sequence=sequence), CHUNK, loss_fn=shifted)


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in LINES if line != "weights"])  # whose mean is refused
@pytest.mark.parametrize("sequence", [RING, ULYSSES], ids=["ring", "ulysses"])
@ranks(8)
def test_whole_sequences_in_2d(sequence: dict[str, Any], line: str) -> None:
    check(Attending, dict(tensor=dict(size=4, mode="2d"), sequence=sequence), CHUNK, loss_fn=LINES[line])
