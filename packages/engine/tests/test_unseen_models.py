"""Models of other makers, with habits that the engine's own do not have: losses and every tensor are those of one process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshfold.engine import Engine
from meshfold.mesh.testing import RankFailure, ranks, run_on_ranks

IDS = torch.randint(1, 13, (5, 6), generator=torch.Generator().manual_seed(1))
RATE = 0.5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Checkpointing(nn.Module):
    """Checkpoints its blocks itself."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.embed, self.head = nn.Embedding(13, 8), nn.Linear(8, 13)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class OffsetRMSNorm(nn.Module):
    """Gemma's: multiplies by one plus the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.eps, self.weight = 1e-6, nn.Parameter(torch.randn(8) / 10)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


class ScaledEmbedding(nn.Embedding):
    """Gemma's: multiplies its rows by a number in a buffer."""

    def __init__(self) -> None:
        super().__init__(13, 8)
        self.register_buffer("scale", torch.tensor(8**0.5), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.scale.to(self.weight.dtype)  # type: ignore[operator]


def gemma() -> nn.Module:
    model = Checkpointing(False)
    model.embed = ScaledEmbedding()
    for block in model.blocks:
        block.norm = OffsetRMSNorm()
    model.head = nn.Linear(8, 13, bias=False)
    model.head.weight = model.embed.weight
    return model


def spectral() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(13, 8), nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 13)
    )


class Quantised(Checkpointing):
    """VQ-VAE's: the nearest row of a table, straight through, and the table is drawn to what chose it."""

    def __init__(self) -> None:
        super().__init__(False)
        self.codes = nn.Embedding(5, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        code = self.codes(torch.cdist(x.flatten(0, 1), self.codes.weight).argmin(1)).view_as(x)
        x = x + (code - x).detach() + (code - code.detach()) / 4
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Filtered(Checkpointing):
    """GFNet's: learned factors of frequencies, stored as pairs of real numbers; and a weight without dims."""

    def __init__(self) -> None:
        super().__init__(False)
        self.filter, self.scale = nn.Parameter(torch.randn(4, 8, 2) / 3), nn.Parameter(torch.tensor(0.3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        frequencies = torch.fft.rfft(x, dim=1) * torch.view_as_complex(self.filter)
        x = x + torch.fft.irfft(frequencies, n=x.shape[1], dim=1) * self.scale.exp()
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def weight_normed() -> nn.Module:
    model = Checkpointing(False)
    for block in model.blocks:
        nn.utils.parametrizations.weight_norm(block.get_submodule("up"))
    return model


def roberta() -> nn.Module:
    from transformers import RobertaConfig, RobertaModel

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = dict(vocab_size=13, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
            config = RobertaConfig(**sizes, max_position_embeddings=12, pad_token_id=1)
            config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
            self.body, self.head = RobertaModel(config, add_pooling_layer=False), nn.Linear(8, 13)

        def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
            return self.head(self.body(input_ids, position_ids=position_ids).last_hidden_state)

    return Words()


def loss_fn(logits: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


LIMITED = dict(stage=3, gpu_memory_limit="64MiB")
COMPILED = dict(compile=dict(backend="aot_eager"))
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], dict[str, Any]]] = {
    "reentrant checkpoints in stages": (lambda: Checkpointing(True), dict(pipeline=dict(size=2, microbatches=2)), {}),
    "checkpoints of compiled blocks": (lambda: Checkpointing(False), dict(data=2), COMPILED),
    "compiled blocks, placed by a plan": (lambda: Checkpointing(False), dict(data=2, zero=LIMITED), COMPILED),
    "scaled rows and norms of one plus the weight": (gemma, dict(tensor=2), {}),
    "spectral norm, placed by a plan": (spectral, dict(zero=LIMITED), {}),
    "weights with norms of their own": (weight_normed, dict(data=2, zero=dict(stage=3)), {}),
    "the nearest code of a table": (Quantised, dict(pipeline=dict(size=2, microbatches=2)), {}),
    "factors of frequencies and a scalar": (Filtered, dict(data=2, zero=dict(stage=3)), {}),
    "positions that depend on the ids": (roberta, dict(sequence=dict(mode="ring", size=2)), {}),
}

SLOW = ("checkpoints of compiled blocks",)


@ranks(2)
@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in CASES])
def test_it_trains_as_in_one_process(case: str) -> None:
    make, spec, settings = CASES[case]
    torch.manual_seed(0)
    serial = make().double()
    ids = IDS.clone()
    ids[0, 4:] = 1  # padding, for a model that knows it
    batch = (ids, IDS)
    with Engine(
        make, spec, precision="fp64", optimizer=dict(name="sgd", lr=RATE), loss_fn=loss_fn, **settings
    ) as engine:
        serial.load_state_dict(engine.full_state_dict())
        for _ in range(2):
            wanted = loss_fn(serial(ids), batch)
            serial.zero_grad()
            wanted.backward()
            assert engine.train_step(engine.shard_batch(batch)) == pytest.approx(float(wanted), rel=1e-12)
            with torch.no_grad():
                for parameter in serial.parameters():
                    if parameter.grad is not None:
                        parameter -= RATE * parameter.grad
        found = engine.full_state_dict()
    assert sys.modules.get("torch._dynamo") is None or torch._dynamo.eval_frame._stance.stance == "default"
    for name, value in serial.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


class Penalised(Checkpointing):
    """Adds a penalty on all its weights to its logits."""

    def __init__(self) -> None:
        super().__init__(reentrant=False)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + sum(parameter.square().sum() for parameter in self.parameters())


def penalised() -> None:
    """Try a step."""
    with Engine(
        Penalised(), dict(pipeline=2), precision="fp64", optimizer=dict(name="sgd", lr=RATE), loss_fn=loss_fn
    ) as engine:
        engine.train_step((IDS, IDS))


def test_a_penalty_on_all_weights_is_refused_in_stages() -> None:
    with pytest.raises(RankFailure, match="goes through all parameters of Penalised"):
        run_on_ranks(2, penalised)


def with_a_penalty(spec: dict[str, Any]) -> None:
    """Try a step with a loss that reads the model's weights."""
    model = Checkpointing(False)

    def penalised_loss(logits: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss_fn(logits, batch) + 0.1 * sum(parameter.square().sum() for parameter in model.parameters())

    optimizer = dict(name="sgd", lr=RATE)
    with Engine(model, spec, precision="fp64", optimizer=optimizer, loss_fn=penalised_loss) as engine:
        engine.train_step((IDS, IDS))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (dict(tensor=2), "in a loss_fn: the loss is computed with a parameter of which this rank has a part"),
        (
            dict(tensor=dict(mode="2d", grid=(1, 2))),
            "in a loss_fn: the loss is computed with a parameter of which this rank has a part",
        ),
        (dict(pipeline=2), "goes through all parameters of Checkpointing, of which a stage has a part"),
    ],
    ids=["1d", "2d", "pipeline"],
)
def test_a_loss_with_a_penalty_on_parts_of_weights_is_refused(spec: dict[str, Any], why: str) -> None:
    with pytest.raises(RankFailure, match=why):
        run_on_ranks(2, with_a_penalty, spec)


class Headless(Checkpointing):
    """Its loss_fn calls the head."""

    def __init__(self) -> None:
        super().__init__(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.few(1)
@pytest.mark.parametrize("spec", [dict(data=2), dict(tensor=2), dict(data=2, zero=dict(stage=3))], ids=str)
@ranks(2)
def test_a_loss_may_call_modules_and_look_at_parameters(spec: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Headless().double()

    def of_hidden(x: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        assert all(parameter.requires_grad and parameter.dim() for parameter in model.parameters())
        return loss_fn(model.head(x), batch)

    serial = Headless().double()
    serial.load_state_dict(model.state_dict())
    wanted = loss_fn(serial.head(serial(IDS)), (IDS, IDS))
    optimizer = dict(name="sgd", lr=RATE)
    with Engine(model, spec, precision="fp64", optimizer=optimizer, loss_fn=of_hidden) as engine:
        assert engine.train_step(engine.shard_batch((IDS, IDS))) == pytest.approx(float(wanted.detach()), rel=1e-12)


def penalise_in_a_loop(kind: str, spec: dict[str, Any]) -> None:
    """Try a step of a loop whose loss reads the model's weights."""
    model = Checkpointing(False)
    with Engine(model, spec, precision="fp64", optimizer=dict(name="sgd", lr=RATE)) as engine:
        ids, labels = engine.shard_batch((IDS, IDS))
        loss = loss_fn(engine(ids), (ids, labels))
        weight = model.blocks[0].get_submodule("up").get_parameter("weight")
        penalties = dict(
            norm=weight.norm, square=lambda: weight.square().sum(), drift=lambda: (weight - 1.0).abs().sum()
        )
        engine.backward(loss + 0.1 * penalties[kind]())


@pytest.mark.parametrize("kind", ["norm", "square", "drift"])
def test_a_penalty_in_a_loop_of_ones_own_is_refused_where_weights_are_split(kind: str) -> None:
    with pytest.raises(RankFailure, match="the loss is computed with a parameter of which this rank has a part"):
        run_on_ranks(2, penalise_in_a_loop, kind, dict(tensor=2))
    run_on_ranks(2, penalise_in_a_loop, kind, dict(data=2))
    run_on_ranks(2, penalise_in_a_loop, kind, dict(data=2, zero=dict(stage=1)))


def differentiate_twice(spec: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(13, 8), Block(), nn.Linear(8, 13))
    with Engine(model, spec, precision="fp64", optimizer=dict(name="sgd", lr=RATE)) as engine:
        x = F.one_hot(engine.shard_batch(IDS), 13).double().requires_grad_()
        (gradient,) = torch.autograd.grad(engine(x).sum(), x, create_graph=True)
        engine.backward(gradient.square().sum())


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (dict(data=2, zero=dict(stage=3)), r"A gradient of gradients.*create_graph=True.*write zero=dict\(stage=2\)"),
        (dict(tensor=2), "Fused kernels and layers that are split have no second derivative"),
    ],
    ids=["zero 3", "tensor"],
)
def test_errors_of_a_backward_say_what_to_change(spec: dict[str, Any], why: str) -> None:
    with pytest.raises(RankFailure, match=why):
        run_on_ranks(2, differentiate_twice, spec)
