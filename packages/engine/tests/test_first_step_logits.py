"""No step has the logits whole, also not the first one, whose operations are looked at: under tensor parallelism each rank has its
words of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.engine import Engine
from meshfold.kernels import logit_chunks
from meshfold.mesh.testing import Operators, ranks
from meshfold.models import GPT, GPTConfig, build

ROWS, LENGTH, WORDS = 4, 128, 1024
IDS = torch.randint(1, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
LABELS = IDS.clone()
LABELS[0, 3:] = LABELS[1, :60] = -100
SIZES: dict[str, Any] = dict(hidden=16, layers=2, heads=2, vocab_size=WORDS, max_positions=LENGTH)


def hugging_face(kind: str, **settings: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="this test trains a model of transformers")
    sizes = dict(vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    config = getattr(transformers, f"{kind}Config")(
        **sizes, num_key_value_heads=2, head_dim=8, max_position_embeddings=LENGTH, pad_token_id=0, **settings
    )
    made: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    return made


def capped() -> nn.Module:
    """Gemma 2, whose logits have a soft cap."""
    return hugging_face("Gemma2", final_logit_softcapping=5.0, query_pre_attn_scalar=8)


class Own(nn.Module):
    """A user's model, whose loss is the usual line, inside of it or outside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, 16), nn.LayerNorm(16)
        self.up_proj, self.down_proj = nn.Linear(16, 24), nn.Linear(24, 16)
        self.head = nn.Linear(16, WORDS + 1)  # which ranks cannot share evenly

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embed(input_ids)
        logits = self.head(self.norm(x + self.down_proj(self.up_proj(x).relu())))
        return logits if labels is None else dict(loss=usual_loss(logits, labels), logits=logits)


def usual_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, WORDS + 1), labels.reshape(-1), label_smoothing=0.1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": partial(build, "llama-tiny", kv_heads=2, ffn=24, **SIZES),
    "gpt": lambda: GPT(GPTConfig(dropout=0.0, **SIZES)),
    "Hugging Face Llama": partial(hugging_face, "Llama"),
    "Hugging Face Gemma 2": capped,
    "own": Own,
}
TWO: dict[str, dict[str, Any]] = {
    "1d": dict(tensor=2),
    "1d + sequence": dict(tensor=2, sequence=dict(mode="megatron")),
    "ring": dict(sequence=dict(mode="ring", size=2)),
}
# Gemma 2's attention has a soft cap, which is refused where ranks share a sequence; as is a loss that moves labels itself.
CASES = [
    (model, spec)
    for model in MODELS
    for spec in TWO
    if (model, spec) not in (("Hugging Face Gemma 2", "ring"), ("own", "ring"))
]
FOUR: dict[str, dict[str, Any]] = {
    "2d": dict(tensor=dict(size=4, mode="2d")),
    "1d + pipeline": dict(tensor=2, pipeline=dict(size=2, microbatches=2)),
}


@contextmanager
def small_chunks() -> Iterator[None]:
    """Context manager: a chunk of logits has 128 rows."""
    with ExitStack() as stack:
        for name in ("CHUNK_BYTES", "LARGE_CHUNK_BYTES"):
            stack.enter_context(mock.patch.object(logit_chunks, name, 1))
        yield


def first_step(
    model: Callable[[], nn.Module], parallel: dict[str, Any], kernels: object
) -> tuple[float, dict[str, Tensor], int]:
    """Return the loss of the first step, the weights after it, less their gradients, and the size of the largest tensor in it."""
    settings: dict[str, Any] = dict(precision="fp64", optimizer=dict(name="sgd", lr=1.0))
    with Engine(model, parallel, kernels=kernels, **settings) as engine:
        with Operators() as seen:
            loss = engine.train_step(engine.shard_batch(dict(input_ids=IDS, labels=LABELS)))
        return loss, engine.full_state_dict(), seen.largest


def check(model: str, parallel: dict[str, Any], parts: int) -> None:
    """Compare with data parallelism without kernels; ``parts``: of the logits, of which a rank must not have a whole one."""
    want, weights, _ = first_step(MODELS[model], {}, "off")
    with small_chunks():
        got, others, largest = first_step(MODELS[model], parallel, dict(loss=True))
    assert largest < IDS.numel() * WORDS // parts
    tolerance = 1e-5 if "Hugging Face" in model else 1e-9  # transformers' norms compute in float32
    assert got == pytest.approx(want, rel=tolerance)
    for name, value in weights.items():
        assert torch.allclose(others[name], value, rtol=tolerance, atol=tolerance), name


@pytest.mark.few(2)
@pytest.mark.parametrize(("model", "spec"), CASES, ids=[f"{model}, {spec}" for model, spec in CASES])
@ranks(2)
def test_on_two_ranks(model: str, spec: str) -> None:
    check(model, TWO[spec], 2)


@ranks(2)
def test_a_loss_outside_of_the_model() -> None:
    """A loss of whole logits, of which every rank has its words."""

    def loss_fn(output: Tensor, batch: Any) -> Tensor:
        return usual_loss(output, batch[1])

    settings: dict[str, Any] = dict(precision="fp64", optimizer=dict(name="sgd", lr=1.0), loss_fn=loss_fn)
    found = []
    for parallel, kernels in ((dict(data=2), "off"), (dict(tensor=2), dict(loss=True))):
        with small_chunks(), Engine(Own, parallel, kernels=kernels, **settings) as engine, Operators() as seen:
            losses = [engine.train_step(engine.shard_batch((IDS, IDS.roll(-1, 1)))) for _ in range(2)]
            losses.append(engine.eval_step(engine.shard_batch((IDS, IDS.roll(-1, 1)))))
            found.append((losses, engine.full_state_dict()))
    (want, weights), (got, others) = found
    assert seen.largest < IDS.numel() * WORDS // 2
    assert got == pytest.approx(want, rel=1e-9)
    for name, value in weights.items():
        assert torch.allclose(others[name], value, rtol=1e-9, atol=1e-12), name


@ranks(2)
def test_logits_that_reach_a_loop_of_ones_own_are_whole_on_every_rank() -> None:
    """Some ranks may read them, and others not."""
    with Engine(Own, dict(tensor=2), kernels=dict(loss=True), optimizer="sgd") as engine:
        mine = engine.shard_batch(dict(input_ids=IDS, labels=IDS))
        output = engine(**mine)
        assert type(output["logits"]) is Tensor and output["logits"].shape == (*IDS.shape, WORDS + 1)
        engine.backward(output["loss"])
        engine.step()


@pytest.mark.few(1)
@pytest.mark.parametrize("spec", FOUR)
@pytest.mark.parametrize("model", ["llama", "Hugging Face Llama"])
@ranks(4)
def test_on_four_ranks(model: str, spec: str) -> None:
    check(model, FOUR[spec], 4)


@pytest.mark.parametrize("model", ["llama", pytest.param("gpt", marks=pytest.mark.slow), "own"])
@ranks(8)
def test_a_head_that_moves_rows(model: str) -> None:
    """In 3D logits have other tokens than the hidden states of the same rank."""
    check(model, dict(tensor=dict(size=8, mode="3d")), 16)
