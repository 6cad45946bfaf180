"""An engine whose spec has the entry ``sequence`` trains as one process does that has every sequence whole."""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.engine import Engine
from meshfold.mesh import Mesh, SpecError
from meshfold.mesh.collectives.primitives import gather
from meshfold.mesh.testing import fake_world, run_on_ranks
from meshfold.models import GPT, GPTConfig, Llama, LlamaConfig
from meshfold.models.generate import generate
from meshfold.models.loss import CausalLMLoss

VOCABULARY, CLIP = 37, 0.5
SIZES: dict[str, Any] = dict(vocab_size=VOCABULARY, hidden=32, layers=2, heads=4, max_positions=24)
# A large epsilon: Adam divides gradients that are zero but for rounding, such as those of key biases, by themselves.
ADAMW: dict[str, Any] = dict(name="adamw", lr=1e-2, weight_decay=0.1, eps=1e-4)


def gpt() -> nn.Module:
    return GPT(GPTConfig(**SIZES))


def dropping_gpt() -> nn.Module:
    return GPT(GPTConfig(**SIZES, dropout=0.2))


def llama() -> nn.Module:
    return Llama(LlamaConfig(**SIZES, kv_heads=2, ffn=48))


def their_loss(logits: Tensor, labels: Tensor, vocab_size: int, shift_labels: Tensor | None = None, **_: Any) -> Tensor:
    """What transformers computes in float32, in the precision of the logits."""
    if shift_labels is None:
        shift_labels = F.pad(labels[:, 1:], (0, 1), value=-100)
    return F.cross_entropy(logits.view(-1, vocab_size), shift_labels.reshape(-1))


def hf_llama() -> nn.Module:
    model = hf_llama_as_it_is()
    model.loss_function = their_loss  # type: ignore[assignment]
    return model


def hf_llama_as_it_is() -> nn.Module:
    import transformers as hf

    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
    )


def hf_gpt2_drops_weights() -> nn.Module:
    model = hf_gpt2()
    model.config.attn_pdrop = 0.2  # type: ignore[union-attr]
    for block in model.transformer.h:  # type: ignore[union-attr]
        block.attn.attn_dropout.p = 0.2  # type: ignore[union-attr]
    return model


class WeightsDrop(nn.Module):
    """Drops attention weights in its own code, and has fewer heads of keys."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.config = SimpleNamespace(attention_dropout=p, num_attention_heads=4)
        self.embed, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.layers = nn.ModuleList(WeightsDropLayer(p) for _ in range(2))
        self.loss = CausalLMLoss()

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return logits if labels is None else self.loss(logits.flatten(0, 1), labels)


class WeightsDropLayer(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p, self.head_dim = p, 4
        self.q_proj, self.out_proj = nn.Linear(16, 16), nn.Linear(16, 16)
        self.k_proj, self.v_proj = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj))
        p = self.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p, enable_gqa=True)
        found: Tensor = x + self.out_proj(y.transpose(1, 2).flatten(2))
        return found


def windowed() -> nn.Module:
    import transformers as hf

    model = hf.MistralForCausalLM(
        hf.MistralConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            intermediate_size=48,
            sliding_window=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
    )
    model.loss_function = their_loss  # type: ignore[assignment]
    return model


def hf_gpt2() -> nn.Module:
    import transformers as hf

    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=32,
            attn_pdrop=0.0,
            resid_pdrop=0.2,
            embd_pdrop=0.2,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


MODELS = {
    "gpt": gpt,
    "dropping gpt": dropping_gpt,
    "llama": llama,
    "hf llama": hf_llama,
    "hf llama as it is": hf_llama_as_it_is,
    "hf gpt2": hf_gpt2,
    "windowed": windowed,
    "hf gpt2 drops weights": hf_gpt2_drops_weights,
    "weights": lambda: WeightsDrop(0.3),
}


def batches(count: int, rows: int, length: int) -> list[dict[str, Tensor]]:
    """Rows have different numbers of labels that count."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        ids = torch.randint(VOCABULARY, (rows, length), generator=generator)
        hidden = torch.rand(ids.shape, generator=generator) < 0.3
        found.append({"input_ids": ids, "labels": ids.masked_fill(hidden, -100)})
    return found


def trained(
    model: str, parallel: dict[str, Any], rows: int, length: int, accumulation: int = 1, **settings: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Loss, norm, targets of every micro-step, the loss of an evaluation, and the weights after three steps."""
    seen: list[float] = []
    arguments: dict[str, Any] = dict(optimizer=ADAMW, precision="fp64", clip_grad_norm=CLIP)
    with Engine(MODELS[model], parallel, gradient_accumulation=accumulation, **{**arguments, **settings}) as engine:
        for batch in batches(3 * accumulation, rows, length):
            seen.append(engine.train_step(engine.shard_batch(batch)))
            assert engine.last is not None
            seen.append(engine.last.tokens)
            if engine.last.stepped:
                assert engine.last.grad_norm is not None
                seen.append(engine.last.grad_norm)
                assert engine.last.grad_norm > CLIP  # clipping is active
        seen.append(engine.eval_step(engine.shard_batch(batches(1, rows, length)[0])))
        return seen, engine.full_state_dict()


@functools.cache
def serial(model: str, rows: int, length: int, accumulation: int) -> tuple[list[float], dict[str, Tensor]]:
    return trained(model, {}, rows, length, accumulation)


def named(value: object) -> str:
    """A test's name, the same in every process: a function's repr is not."""
    return re.sub(r"<function (\w+) at 0x\w+>", r"\1", str(value))


def own_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mesh: Mesh, causal: bool, scale: float | None, length: int, **_: Any
) -> Tensor:
    """Keys and values of all ranks at once, in the order in which they are given to a mode of one's own."""
    k, v = (gather(x, mesh, 1, ("seq",))[:, :length].transpose(1, 2) for x in (k, v))
    mine = mesh.index("seq") * q.shape[1] + torch.ones(q.shape[1]).cumsum(0) - 1
    seen = mine[:, None] >= torch.ones(length).cumsum(0) - 1 if causal else None
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k, v, attn_mask=seen, scale=scale, enable_gqa=q.shape[2] != k.shape[1]
    )
    return out.transpose(1, 2)


def compare(
    world: int,
    model: str,
    parallel: dict[str, Any],
    *,
    rows: int = 3,
    length: int = 13,
    accumulation: int = 1,
    **settings: Any,
) -> None:
    wanted, weights = serial(model, rows, length, accumulation)
    for seen, found in run_on_ranks(world, trained, model, parallel, rows, length, accumulation, **settings):
        near = 1e-9  # transformers computes its loss in float32, and norms where they are not split
        if model.startswith("hf"):
            near = 1e-5 if "as it is" in model else 1e-6 if "tensor" in parallel else 1e-9
        assert seen == pytest.approx(wanted, rel=near), (model, parallel)
        assert list(found) == list(weights)
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=near, atol=near, msg=f"{parallel} {name}")


def ring(size: int) -> dict[str, Any]:
    return dict(mode="ring", size=size)


def ulysses(size: int) -> dict[str, Any]:
    return dict(mode="ulysses", size=size)


BOTH = dict(mode="ring_ulysses", size=4, ulysses=2)


def test_the_serial_engine_is_a_plain_loop() -> None:
    """What all else is compared with."""
    wanted, weights = serial("gpt", 3, 13, 2)
    plain = gpt().double()
    with Engine(gpt, {}, precision="fp64") as engine:
        plain.load_state_dict(engine.full_state_dict())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4)
    losses = []
    for number, batch in enumerate(batches(6, 3, 13)):
        loss = plain(**batch).loss
        (loss / 2).backward()
        losses.append(loss.item())
        if number % 2:
            nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    assert [wanted[0], wanted[2]] == pytest.approx(losses[:2], rel=1e-12)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "model",
    [pytest.param(model, marks=pytest.mark.slow) if model in ("gpt", "llama") else model for model in list(MODELS)[:6]],
)
def test_data_and_ring(model: str) -> None:
    """The tests below have the others with dropout and shared heads."""
    compare(4, model, dict(data=2, sequence=ring(2)))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("model", "parallel", "settings"),
    [
        pytest.param("gpt", dict(sequence=ring(4)), dict(accumulation=2), marks=pytest.mark.slow),
        ("dropping gpt", dict(sequence=ring(4)), dict(accumulation=2, length=8)),
        ("dropping gpt", dict(sequence=ulysses(4)), {}),
        ("llama", dict(sequence=BOTH), {}),
        pytest.param("dropping gpt", dict(sequence=BOTH), dict(accumulation=2), marks=pytest.mark.slow),
        pytest.param("hf llama", dict(sequence=BOTH), {}, marks=pytest.mark.slow),
        ("hf gpt2", dict(sequence=ulysses(2), data=2), dict(accumulation=2)),
        ("gpt", dict(sequence=ring(4)), dict(length=2)),  # fewer tokens than ranks
        ("gpt", dict(data=4, sequence=ring(1)), {}),
        ("dropping gpt", dict(data=2, sequence=dict(mode=own_attention, size=2)), {}),
    ],
    ids=named,
)
def test_modes_lengths_and_accumulation(model: str, parallel: dict[str, Any], settings: dict[str, Any]) -> None:
    compare(4, model, parallel, **settings)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        pytest.param("dropping gpt", dict(tensor=2, sequence=ring(2)), marks=pytest.mark.slow),
        ("llama", dict(tensor=2, sequence=ulysses(2))),
        pytest.param("hf llama", dict(tensor=2, sequence=ring(2)), marks=pytest.mark.slow),
        ("hf gpt2", dict(tensor=2, sequence=ring(2))),
        ("dropping gpt", dict(tensor=dict(mode="2d", grid=(2, 1)), sequence=ring(2))),
        ("dropping gpt", dict(tensor=dict(mode="2d", grid=(1, 2)), sequence=ring(2))),
        pytest.param("hf llama", dict(tensor=dict(mode="2d", grid=(2, 1)), sequence=ring(2)), marks=pytest.mark.slow),
        ("dropping gpt", dict(tensor=dict(mode="3d", grid=(2, 1, 1)), sequence=ulysses(2))),
        ("hf llama", dict(tensor=dict(mode="3d", grid=(1, 2, 1)), sequence=ring(2))),
    ],
    ids=named,
)
def test_tensor_modes(model: str, parallel: dict[str, Any]) -> None:
    compare(4, model, parallel)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        dict(tensor=dict(mode="2d", size=4), sequence=ring(2)),
        dict(tensor=dict(mode="2.5d", size=4, depth=1), sequence=ulysses(2)),
        dict(tensor=dict(mode="3d", grid=(2, 2, 1)), sequence=ring(2)),
        dict(tensor=dict(mode="3d", grid=(1, 2, 2)), sequence=ulysses(2)),
        dict(data=2, tensor=2, sequence=ring(2), zero=dict(stage=3)),
        dict(data=2, sequence=BOTH, zero=dict(stage=2)),
    ],
    ids=named,
)
def test_eight_ranks(parallel: dict[str, Any]) -> None:
    compare(8, "dropping gpt", parallel)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("model", "parallel", "settings"),
    [
        ("dropping gpt", dict(data=2, sequence=ring(2), zero=dict(stage=3)), dict(accumulation=2)),
        ("dropping gpt", dict(sequence=ring(2), data=2, zero=dict(stage=1)), {}),
        ("hf llama", dict(sequence=BOTH, zero=dict(stage=2)), {}),
        ("llama", dict(tensor=2, sequence=ring(2), zero=dict(stage=3)), {}),
        ("dropping gpt", dict(sequence=ring(2), data=2, zero=dict(stage=3)), dict(recompute="blocks")),
        pytest.param("dropping gpt", dict(sequence=ring(2), data=2), dict(recompute="blocks"), marks=pytest.mark.slow),
        ("hf gpt2", dict(sequence=ring(2), data=2), dict(recompute="blocks")),
    ],
    ids=named,
)
def test_zero_and_recomputation(model: str, parallel: dict[str, Any], settings: dict[str, Any]) -> None:
    compare(4, model, parallel, **settings)


# -- gradients as such, and what else a loss may be ------------------------------------------------------------------


def stepped(parallel: dict[str, Any], way: str, precision: str = "fp64") -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of two SGD steps of size 1, without clipping: a factor in a gradient would show as it is."""
    model, seen = MODELS["dropping gpt"], []
    own = shifted_mean if way == "loss_fn" else None
    with Engine(model, parallel, optimizer=dict(name="sgd", lr=1.0), precision=precision, loss_fn=own) as engine:
        for batch in batches(2, 4, 11):
            mine = engine.shard_batch(batch)
            if way == "train_step":
                seen.append(engine.train_step(mine))
            elif way == "loss_fn":
                seen.append(engine.train_step((mine["input_ids"], mine["input_ids"])))
            else:
                if way == "logits":
                    logits = engine(mine["input_ids"]).logits
                    assert logits.shape == (*mine["input_ids"].shape, VOCABULARY)
                    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), mine["input_ids"][:, 1:].flatten())
                else:
                    loss = engine(mine["input_ids"], labels=mine["input_ids"]).loss
                engine.backward(loss)
                engine.step()
                seen.append(loss.item())
        return seen, engine.full_state_dict()


def shifted_mean(output: Any, batch: Any) -> Tensor:
    """Knows of no ranks: it moves labels itself."""
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch[1][:, 1:].flatten())


WAYS = ("train_step", "loss_fn", "logits", "labels")
SPECS: tuple[dict[str, Any], ...] = (
    dict(sequence=ring(4)),
    dict(data=2, sequence=ulysses(2)),
    dict(tensor=2, sequence=ring(2)),
)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("way", "parallel"),
    [
        pytest.param(way, parallel, marks=pytest.mark.slow if (n + m) % 2 else ())
        for n, way in enumerate(WAYS)
        for m, parallel in enumerate(SPECS)
    ],
    ids=named,
)
def test_no_gradient_has_a_factor(way: str, parallel: dict[str, Any]) -> None:
    """Every other pair of a way and a spec; the slow ones are the others."""
    wanted, weights = stepped({}, way)
    every = run_on_ranks(4, stepped, parallel, way)
    if "data" not in parallel or way in ("train_step", "loss_fn"):  # else each has its own rows' loss
        assert all(seen == pytest.approx(wanted, rel=1e-9) for seen, _ in every), parallel
    for name, value in weights.items():
        torch.testing.assert_close(every[0][1][name], value, rtol=1e-9, atol=1e-10, msg=f"{parallel} {name}")


def test_bf16_is_near() -> None:
    wanted, _ = stepped({}, "train_step", "bf16")
    for parallel in (dict(sequence=ring(4)), dict(data=2, sequence=ring(2), zero=dict(stage=3))):
        for seen, _ in run_on_ranks(4, stepped, parallel, "train_step", "bf16"):
            assert seen == pytest.approx(wanted, rel=5e-3), parallel


# -- dropout, recomputation ------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("model", ["hf gpt2 drops weights", "weights"])
def test_attention_drops_the_weights_that_one_process_drops(model: str) -> None:
    assert serial(model, 3, 13, 1)[0] != serial("hf gpt2", 3, 13, 1)[0]
    compare(4, model, dict(data=2, sequence=ring(2)))
    compare(4, model, dict(sequence=BOTH), recompute="blocks")
    compare(4, model, dict(pipeline=2, sequence=ulysses(2)))
    if model != "weights":
        compare(4, model, dict(tensor=2, sequence=ring(2)))


class Pattern(nn.Module):
    """Hands out what its dropout did to ones, three dims and two, beside an attention that changes nothing."""

    flat_tokens = False

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(8, width), nn.Dropout(0.5)
        nn.init.ones_(self.embed.weight)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        q = x.unsqueeze(1)
        dropped: Tensor = self.drop(x + 0.0 * F.scaled_dot_product_attention(q, q, q, is_causal=True).squeeze(1))
        return dropped


def pattern(parallel: dict[str, Any], rows: int, length: int, width: int) -> Tensor:
    with Engine(lambda: Pattern(width), parallel, optimizer="sgd", loss_fn=shifted_mean) as engine:
        ids = torch.zeros(rows, length, dtype=torch.int64)
        out: Tensor = engine(engine.shard_batch(ids)).detach()
        return out


@pytest.mark.parametrize(("rows", "length", "width"), [(1, 8, 4), (2, 7, 4), (1, 16, 4)])
def test_a_token_has_one_fate(rows: int, length: int, width: int) -> None:
    """Also where a rank has as many tokens as there are features, or rows of the batch."""
    wanted = pattern({}, rows, length, width)
    assert 0.2 < float((wanted == 0).float().mean()) < 0.8
    for found in run_on_ranks(4, pattern, dict(sequence=ring(4)), rows, length, width):
        assert torch.equal(found, wanted)
    if rows == 2:
        both = run_on_ranks(4, pattern, dict(data=2, sequence=ring(2)), rows, length, width)
        assert torch.equal(torch.cat([both[0], both[2]]), wanted)


# -- checkpoints, generation -----------------------------------------------------------------------------------------


class Bare(nn.Module):
    """Its blocks attend, and count positions, in their own code: there is no module inside that could be watched."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.blocks = nn.ModuleList(BareBlock() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class BareBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.1 * torch.arange(x.shape[1], device=x.device).unsqueeze(-1)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def bare(parallel: dict[str, Any], recompute: str | None) -> dict[str, Tensor]:
    def loss(output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), batch[1].flatten())

    settings: dict[str, Any] = dict(optimizer=dict(name="sgd", lr=0.1), precision="fp64", recompute=recompute)
    with Engine(Bare, parallel, loss_fn=loss, **settings) as engine:
        outputs = []
        for length in (
            6,
            12,
        ):  # both forwards before the first backward: each is repeated with its own length
            ids = torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(length))
            outputs.append((engine(ids), ids))
        for output, ids in outputs:
            engine.backward(loss(output, (ids, ids)))
        engine.step()
        return engine.full_state_dict()


def test_blocks_are_recomputed_as_they_were() -> None:
    wanted = bare({}, None)
    for found in run_on_ranks(2, bare, dict(sequence=ring(2)), "blocks"):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-10)


def saved(parallel: dict[str, Any], folder: str, load: str | None) -> tuple[list[float], dict[str, Tensor]]:
    with Engine(llama, parallel, optimizer=ADAMW, precision="fp64") as engine:
        if load is not None:
            engine.load(load)
        seen = [engine.train_step(engine.shard_batch(batch)) for batch in batches(2, 3, 9)]
        engine.save(folder)
        return seen, engine.full_state_dict()


@pytest.mark.few(1)
@pytest.mark.parametrize("zero", [{}, dict(zero=dict(stage=3))], ids=["plain", "zero"])
def test_checkpoints_go_from_one_spec_to_another(zero: dict[str, Any], tmp_path: Path) -> None:
    parallel = dict(sequence=ring(2), **zero)
    first, _ = run_on_ranks(2, saved, parallel, str(tmp_path / "two"), None)[0]
    alone, _ = saved({}, str(tmp_path / "one"), None)
    assert first == pytest.approx(alone, rel=1e-9)
    here, weights = saved({}, str(tmp_path / "a"), str(tmp_path / "two"))
    there, others = run_on_ranks(2, saved, parallel, str(tmp_path / "b"), str(tmp_path / "one"))[0]
    assert here == pytest.approx(there, rel=1e-9) and here[0] < first[0]
    for name, value in weights.items():
        torch.testing.assert_close(others[name], value, rtol=1e-9, atol=1e-9)


def continued(parallel: dict[str, Any], model: str) -> tuple[Tensor, Tensor]:
    with Engine(MODELS[model], parallel, precision="fp64") as engine:
        ids = torch.randint(VOCABULARY, (2, 3), generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            logits = engine.model.eval()(ids).logits
        return logits, generate(engine.model, ids, 6, temperature=0.0)


@pytest.mark.few(1)
@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", ["gpt", "hf llama"])
def test_generation_and_logits_are_those_of_one_process(model: str, turn: int) -> None:
    """Each spec with one of the models; the slow half has the other one."""
    logits, text = continued({}, model)
    specs: list[dict[str, Any]] = [
        dict(sequence=ring(2), data=2),
        dict(sequence=BOTH),
        dict(sequence=ring(2), zero=dict(stage=3), data=2),
    ]
    for parallel in specs[(turn + (model == "gpt")) % 2 :: 2]:
        for found, words in run_on_ranks(4, continued, parallel, model):
            torch.testing.assert_close(found, logits, rtol=1e-9, atol=1e-9)
            assert torch.equal(words, text)


# -- masks, positions ------------------------------------------------------------------------------------------------


def padded(parallel: dict[str, Any]) -> float:
    """Rows of different lengths, as tokenizers pad them."""
    with Engine(hf_llama, parallel, precision="fp64", optimizer=ADAMW) as engine:
        mask = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])
        ids = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(3))
        batch = dict(input_ids=ids, labels=ids.masked_fill(mask == 0, -100), attention_mask=mask)
        engine.train_step(batch)
        return engine.train_step({**batch, "position_ids": torch.arange(9).expand(2, 9)})


def test_padding_on_the_right_is_left_out() -> None:
    wanted = padded({})
    assert run_on_ranks(2, padded, dict(sequence=ring(2))) == pytest.approx([wanted] * 2, rel=1e-9)


PACKS: dict[str, list[list[int]]] = {
    "one row": [[4, 1, 8]],
    "alike": [[6, 7], [6, 7]],
    "each row its own": [[4, 9], [13]],
}
"""lengths of the documents of each row"""


def packed(parallel: dict[str, Any], model: str, pack: str) -> tuple[list[float], dict[str, Tensor]]:
    """As transformers' DataCollatorWithFlattening packs documents."""
    ids = batches(1, len(PACKS[pack]), 13)[0]["input_ids"]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in PACKS[pack]])
    batch = dict(input_ids=ids, position_ids=positions, labels=ids.masked_fill(positions == 0, -100))
    if pack == "one row":
        bounds = torch.tensor([0, *PACKS[pack][0]]).cumsum(0)
        batch |= dict(cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)
    with Engine(MODELS[model], parallel, precision="fp64", optimizer=ADAMW, seed=3) as engine:
        return [engine.train_step(batch), engine.eval_step(batch)], engine.full_state_dict()


def by_document(model: str, pack: str) -> float:
    """The loss of the documents one by one, each a sequence of its own."""
    with Engine(MODELS[model], {}, precision="fp64", seed=3) as engine, torch.no_grad():
        total, counted = 0.0, 0
        for ids, lengths in zip(batches(1, len(PACKS[pack]), 13)[0]["input_ids"], PACKS[pack], strict=True):
            for document in ids.split(lengths):
                if len(document) > 1:
                    loss = engine.model(document[None], labels=document[None], use_cache=False).loss
                    total += float(loss) * (len(document) - 1)
                    counted += len(document) - 1
        return total / counted


@pytest.mark.few(1)
@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", ["hf llama", "windowed"])
def test_packed_documents_and_windows(model: str, turn: int) -> None:
    """Each spec with each model and one of two packs; the slow half has the other one."""
    for number, pack in enumerate(PACKS):
        wanted, weights = packed({}, model, pack)
        assert wanted[0] == pytest.approx(by_document(model, pack), rel=1e-9)
        specs = [
            dict(sequence=ring(4)),
            dict(tensor=2, sequence=ulysses(2)),
            dict(pipeline=2, sequence=ring(2)),
        ]
        if pack == "each row its own":  # of which attention has one
            specs.append(dict(tensor=dict(mode="2d", grid=(2, 1)), sequence=ring(2)))
        turned = (turn + (model == "windowed") + (number == 2)) % 2
        for parallel in specs[turned:1] if pack == "alike" else specs[turned::2]:
            near = 1e-6 if "tensor" in parallel else 1e-9  # norms are in float32 there
            for seen, found in run_on_ranks(4, packed, parallel, model, pack):
                assert seen == pytest.approx(wanted, rel=near), (parallel, pack)
                for name, value in weights.items():
                    torch.testing.assert_close(found[name], value, rtol=near, atol=near)


# -- what is refused -------------------------------------------------------------------------------------------------


class Sums(nn.Module):
    """Attends to nothing, or by hand; makes its loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        logits: Tensor = self.head((x @ x.mT).softmax(-1) @ x)
        return logits if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Pooled(Sums):
    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(ids).unsqueeze(1)
        return F.scaled_dot_product_attention(x, x, x, is_causal=True).squeeze(1).mean(1)


class Mixes(Sums):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(8, 8, 3)


class Images(Sums):
    """Its convolution becomes a split layer under tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, 8, 2, stride=2)


class Attends(Sums):
    """Attends by torch's own module."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2)


def hf_of_other_layers() -> nn.Module:
    model = hf_llama()
    model.config.layer_types = ["linear_attention", "full_attention"]  # type: ignore[union-attr]
    return model


REFUSED: list[tuple[Any, dict[str, Any], dict[str, Any], str]] = [
    (Sums, dict(sequence=ring(2)), {}, "the loss inside Sums would shift labels"),
    (Mixes, dict(sequence=ring(2)), dict(loss_fn=shifted_mean), "mix, a Conv1d, mixes tokens"),
    (
        Attends,
        dict(sequence=ring(2)),
        dict(loss_fn=shifted_mean),
        "attend, an nn.MultiheadAttention, attends in a way",
    ),
    (
        Attends,
        dict(sequence=ring(2), tensor=2),
        dict(loss_fn=shifted_mean),
        "attend, an nn.MultiheadAttention, attends in a way",
    ),
    (
        Images,
        dict(sequence=ulysses(2), tensor=2),
        dict(loss_fn=shifted_mean),
        "patch, a Conv2d, mixes tokens",
    ),
    (hf_of_other_layers, dict(sequence=ring(2)), {}, "layers of type linear_attention"),
    (
        hf_gpt2_drops_weights,
        dict(sequence=dict(mode=own_attention, size=2)),
        {},
        "attn_pdrop=0.2: the model's own attention",
    ),
    (
        llama,
        dict(sequence=ulysses(3)),
        {},
        "4 query heads cannot be split over 3 ranks of ulysses: give it 2, 4",
    ),
    (llama, dict(tensor=2, sequence=ulysses(4)), {}, "a rank has 2 of 4 heads, and 2 query heads"),
]


@pytest.mark.parametrize(("model", "parallel", "settings", "message"), REFUSED, ids=[row[-1][:30] for row in REFUSED])
def test_what_cannot_be_is_refused_before_anything_starts(
    model: Any, parallel: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    size = math.prod(entry if isinstance(entry, int) else entry["size"] for entry in parallel.values())
    with fake_world(size), pytest.raises(SpecError, match=message):
        Engine(model, parallel, optimizer=ADAMW, **settings)


@pytest.mark.parametrize(("make", "loss_fn"), [(Attends, shifted_mean), (Mixes, shifted_mean), (Sums, None)])
def test_a_module_that_is_refused_stays_as_it_was_given(make: Any, loss_fn: Any) -> None:
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with fake_world(4), pytest.raises(SpecError, match=r"mixes tokens|attends in a way|cannot be told"):
        Engine(model, dict(tensor=2, sequence=ring(2)), optimizer=ADAMW, loss_fn=loss_fn)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())


IDS = torch.zeros(2, 6, dtype=torch.int64)
LEFT = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
FORWARDS: list[tuple[Any, Any, dict[str, Any], str]] = [
    (Sums, shifted_mean, dict(ids=IDS), "pairs elements of two dims that are split over seq"),
    (Sums, shifted_mean, dict(ids=IDS, labels=IDS), "the loss inside the model would shift labels"),
    (Pooled, shifted_mean, dict(ids=IDS), "mean of .* reduces over dim 1, which is split over seq"),
    (hf_llama, None, dict(input_ids=IDS, attention_mask=LEFT), "attention_mask hides tokens"),
    (
        hf_llama,
        None,
        dict(input_ids=IDS, labels=IDS, attention_mask=LEFT.flip(1)),
        "attention_mask hides tokens",
    ),
    (
        hf_llama,
        None,
        dict(input_ids=IDS, position_ids=IDS, attention_mask=torch.ones_like(IDS)),
        "leave attention_mask out",
    ),
    (hf_llama, None, dict(input_ids=IDS, position_ids=IDS[:, :4]), r"position_ids \[2, 4\] for tokens"),
    (
        hf_llama,
        None,
        dict(input_ids=IDS[:1], cu_seq_lens_q=torch.tensor([0, 2, 6])),
        r"cu_seq_lens_q=\[0, 2, 6\] with 1 × 6 tokens, whose position_ids restart at \[\[0\]\]",
    ),
    (hf_llama, None, dict(input_ids=IDS, use_cache=True), "use_cache"),
    (hf_llama, None, dict(input_ids=IDS, logits_to_keep=1), "logits_to_keep=1"),
    (gpt, None, dict(input_ids=IDS, labels=IDS[:, :4]), r"labels \(2, 4\) for tokens \(2, 6\)"),
    (gpt, None, {}, "without a tensor"),
]


@pytest.mark.filterwarnings("ignore:module forward hook with `always_call=True`")
@pytest.mark.parametrize(("model", "loss_fn", "given", "message"), FORWARDS, ids=[row[-1][:30] for row in FORWARDS])
def test_forwards_that_would_be_wrong_are_refused(model: Any, loss_fn: Any, given: Any, message: str) -> None:
    with (
        fake_world(2),
        Engine(model, dict(sequence=ring(2)), loss_fn=loss_fn) as engine,
        torch.no_grad(),
        pytest.raises(ValueError, match=message),
    ):
        engine.model(**given)


def test_close_leaves_the_model_as_it_was() -> None:
    model, ids = gpt().double(), IDS
    alone = model(ids, labels=ids)
    with fake_world(2), Engine(model, dict(sequence=ring(2)), precision="fp64"):
        assert any(not getattr(module, "shifts", True) for module in model.modules())
    again = model(ids, labels=ids)
    assert torch.equal(alone.logits, again.logits) and torch.equal(alone.loss, again.loss)


def test_rows_are_split_over_data_ranks_alone() -> None:
    with fake_world(4, rank=3), Engine(gpt, dict(data=2, sequence=ring(2))) as engine:
        assert torch.equal(engine.shard_batch(torch.arange(6).view(6, 1)), torch.tensor([[3], [4], [5]]))
        loader = engine.dataloader([{"input_ids": torch.tensor([i])} for i in range(8)], batch_size=4, shuffle=False)
        assert next(iter(loader))["input_ids"].flatten().tolist() == [2, 3]
