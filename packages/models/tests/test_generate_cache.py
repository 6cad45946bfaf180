"""Text generated with keys and values kept is the text that is computed anew, and costs one token a forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from meshfold.engine import Engine
from meshfold.mesh import SpecError
from meshfold.mesh.testing import run_on_ranks
from meshfold.models import GPT, GPTConfig, Llama, LlamaConfig, generate
from meshfold.models.attention import Attention
from meshfold.models.generate import SPARE, KeyValueCache

VOCABULARY, LONGEST, WINDOW = 37, 20, 4
SIZES: dict[str, Any] = dict(vocab_size=VOCABULARY, hidden=32, layers=4, heads=4, max_positions=LONGEST, tie=False)


def varied(model: nn.Module) -> Any:
    """With weights so large that tokens depend on those before them."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.mul_(6 if "blocks" in name else 20)
    return model


def gpt(**changes: Any) -> Any:
    torch.manual_seed(0)
    return varied(GPT(GPTConfig(**{**SIZES, **changes})))


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    return varied(Llama(LlamaConfig(**{**SIZES, "kv_heads": 2, "ffn": 48, **changes})))


def windowed_llama() -> Any:
    return llama(window=WINDOW)


MODELS: dict[str, Any] = {"gpt": gpt, "llama": llama, "windowed llama": windowed_llama}


def prompt(rows: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(7))


@contextmanager
def lengths(model: nn.Module) -> Iterator[list[int]]:
    """How many tokens of a row the first attention of this rank is given, call by call."""
    seen: list[int] = []
    attention = next(m for m in model.modules() if isinstance(m, Attention))
    hook = attention.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    yield seen
    hook.remove()


# -- one process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=["float64", "float32"]
)
@pytest.mark.parametrize(
    "model",
    [gpt(), gpt(window=WINDOW), gpt(kv_heads=2, head_dim=4), llama(), llama(window=WINDOW), llama(window=1)],
    ids=["gpt", "gpt window", "gpt gqa", "llama gqa", "llama gqa window", "llama window 1"],
)
def test_the_text_is_that_without_a_cache(model: Any, dtype: torch.dtype) -> None:
    model = model.to(dtype)
    texts = set()
    for rows, length in ((1, 1), (3, 1), (3, 7)):
        for settings in (dict(temperature=0.0), dict(top_k=30, generator=3)):
            ids, new = prompt(rows, length), LONGEST - length
            with lengths(model) as seen:
                kept = generate(model, ids, new, **settings)  # type: ignore[arg-type]
            assert seen == [length] + [1] * (new - 1)
            anew = generate(model, ids, new, use_cache=False, **settings)  # type: ignore[arg-type]
            assert torch.equal(kept, anew), (rows, length, settings)
            texts.add(tuple(kept[-1, length:].tolist()))
    assert len(texts) == 6  # weights say something


def test_rows_that_no_longer_fit_are_computed_anew() -> None:
    model, ids = llama(), prompt(2, LONGEST - 3)
    with lengths(model) as seen:
        kept = generate(model, ids, 6, temperature=0.0)
    assert seen == [LONGEST - 3, 1, 1, 1, LONGEST, LONGEST]
    assert torch.equal(kept, generate(model, ids, 6, temperature=0.0, use_cache=False))
    for length in (LONGEST, LONGEST + 5):
        ids = prompt(2, length)
        with lengths(model) as seen:
            kept = generate(model, ids, 3, temperature=0.0)
        assert seen == [LONGEST] * 3
        assert torch.equal(kept, generate(model, ids, 3, temperature=0.0, use_cache=False))


def test_rows_end_at_their_own_end_of_sequence() -> None:
    model, ids, new = windowed_llama(), prompt(3, 2), 18
    whole = generate(model, ids, new, temperature=0.0)[:, 2:]
    firsts = {token: [(row == token).nonzero()[:1].flatten().tolist() for row in whole] for token in range(VOCABULARY)}
    token = next(
        t for t, at in firsts.items() if all(at[:2]) and at[0] != at[1] and not at[2]
    )  # two rows end, each in its place
    for use_cache in (True, False):
        found = generate(model, ids, new, temperature=0.0, eos_token_id=token, use_cache=use_cache)[:, 2:]
        for row, other, at in zip(found, whole, firsts[token], strict=True):
            stop = at[0] + 1 if at else new
            assert torch.equal(row[:stop], other[:stop])
            assert (row[stop:] == token).all()
    both = generate(model, ids[:2], new, temperature=0.0, eos_token_id=token)
    assert both.shape[1] == 2 + max(at[0] for at in firsts[token][:2]) + 1 < 2 + new
    with pytest.raises(SpecError, match="eos_token_id=-1"):
        generate(model, ids, 1, eos_token_id=-1)


def test_the_cache_has_the_documented_shape_and_goes_at_the_end() -> None:
    for window, kept in ((None, 11), (WINDOW, WINDOW)):
        model = llama(window=window).double()
        layers = [m for m in model.modules() if isinstance(m, Attention)]
        held: list[int] = []
        hook = model.norm.register_forward_pre_hook(
            lambda module, args, layers=layers, held=held: held.append(sum(m.kv_cache.bytes for m in layers))
        )
        generate(model, prompt(3, 5), 7)
        hook.remove()
        # 2 · layers · rows · kv_heads · length · head_dim in float64; the last token is never asked about
        assert held == [2 * 4 * 3 * 2 * kept * 8 * 8] * 7
        assert all(m.kv_cache is None for m in layers)

        hook = model.norm.register_forward_pre_hook(lambda module, args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generate(model, prompt(3, 5), 7)
        hook.remove()
        assert all(m.kv_cache is None for m in layers)


def test_a_cache_grows_by_doubling_and_keeps_a_window_as_a_ring() -> None:
    def tokens(first: int, stop: int) -> Tensor:
        return torch.arange(first, stop, dtype=torch.float64).view(1, -1, 1, 1).expand(2, -1, 3, 5)

    for most, prompted in ((1000, 1), (1000, 70), (6, 1), (6, 5), (6, 6), (6, 8), (6, 13), (1, 1), (1, 3)):
        cache, sizes = KeyValueCache(most), []
        k, v = cache.add(tokens(0, prompted), -tokens(0, prompted))
        assert torch.equal(k, tokens(0, prompted)) and torch.equal(v, -k)
        for t in range(prompted, prompted + 300):
            cache.rewind()
            k, v = cache.add(tokens(t, t + 1), -tokens(t, t + 1))
            assert k.shape == (2, min(t + 1, most), 3, 5) and torch.equal(v, -k)
            assert sorted(k[1, :, 2, 4].tolist()) == list(range(max(0, t + 1 - most), t + 1))
            sizes.append(cache.bytes // (2 * 2 * 3 * 5 * 8))
        grown = sorted(set(sizes))
        room = [(prompted + SPARE) << times for times in range(len(grown))]
        assert grown == ([most] if most < 1000 else room)
        cache.rewind()
        with pytest.raises(SpecError, match="2 tokens for a cache that has"):
            cache.add(tokens(0, 2), tokens(0, 2))


def test_a_token_that_comes_alone_needs_no_mask() -> None:
    for model in (gpt(), llama(window=WINDOW)):
        like = torch.zeros(2, 32)
        assert model.mask(torch.full((2, 1), 9), like, 1) is None
        assert model.mask(torch.full((2, 2), 9), like, 2) is not None


class Averaging(nn.Module):
    """Attention of one's own: each token sees the mean of those before it."""

    def forward(self, x: Tensor, seq_len: int, *_: Any, **__: Any) -> Tensor:
        rows = x.view(-1, seq_len, x.shape[-1])
        mean: Tensor = rows.cumsum(1) / torch.arange(1, seq_len + 1).view(-1, 1)
        return mean.reshape(x.shape)


class WithoutPositions(GPT):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        return super().forward(input_ids, labels)


def test_models_that_are_not_ours_throughout_compute_all_tokens_anew() -> None:
    changed, ids = gpt(), prompt(2, 3)
    changed.blocks[1].attn = Averaging()
    torch.manual_seed(0)
    for model in (changed, varied(WithoutPositions(GPTConfig(**SIZES)))):
        with lengths(model) as seen:
            kept = generate(model, ids, 4, temperature=0.0)
        assert seen == [3, 4, 5, 6]
        assert torch.equal(kept, generate(model, ids, 4, temperature=0.0, use_cache=False))


def test_compiled_blocks_are_compiled_for_training_alone() -> None:
    model, ids = llama(), prompt(2, 6)
    wanted, counter = generate(model, ids, 8, temperature=0.0), CompileCounter()
    for block in model.blocks:
        block.compile(backend=counter, fullgraph=True)

    def trained() -> tuple[float, int]:
        loss = model(ids, labels=ids).loss
        loss.backward()
        return loss.item(), counter.frame_count

    before = trained()
    assert before[1] > 0
    assert torch.equal(generate(model, ids, 8, temperature=0.0), wanted)
    assert trained() == before

    whole = torch.compile(llama(), backend=counter)
    with lengths(whole) as seen:
        assert torch.equal(generate(whole, ids, 8, temperature=0.0), wanted)
    assert seen == [6] + [1] * 7
    assert counter.frame_count == before[1]


# -- on ranks ---------------------------------------------------------------------------------------------------------


def texts(parallel: dict[str, Any], model: str, rows: int, **settings: Any) -> list[Tensor]:
    """How many tokens of a row attention was given; what is likeliest after six tokens and after one, and what is drawn."""
    with Engine(MODELS[model], parallel, precision="fp64") as engine:
        with lengths(engine.model) as seen:
            found = [
                generate(engine.generator, prompt(rows, 6), 6, temperature=0.0, **settings),
                generate(engine.generator, prompt(rows, 1), 6, temperature=0.0, **settings),
                generate(engine.generator, prompt(rows, 6), 6, top_k=30, generator=3, **settings),
            ]
        assert all(m.kv_cache is None for m in engine.model.modules() if isinstance(m, Attention))
    return [torch.tensor(sorted(set(seen))), *found]


RING = dict(mode="ring", size=2)
MEGATRON = dict(mode="megatron")
CASES: list[tuple[int, dict[str, Any], str, int]] = [
    (2, dict(tensor=2), "gpt", 3),
    (2, dict(tensor=2), "windowed llama", 2),
    (2, dict(tensor=2, sequence=MEGATRON), "gpt", 1),
    (2, dict(tensor=2, sequence=MEGATRON), "llama", 3),
    (2, dict(data=2), "llama", 2),
    (2, dict(data=2, zero=dict(stage=1)), "gpt", 2),
    (2, dict(data=2, zero=dict(stage=2)), "llama", 1),
    (2, dict(data=2, zero=dict(stage=3)), "windowed llama", 3),
    (2, dict(pipeline=2), "gpt", 1),
    (2, dict(pipeline=2), "windowed llama", 3),
    (2, dict(pipeline=dict(size=2, schedule="interleaved", chunks=2)), "llama", 5),
    (4, dict(tensor=4), "llama", 2),  # ranks share key/value heads
    (4, dict(tensor=dict(mode="2d", size=4)), "windowed llama", 1),
    (4, dict(tensor=dict(mode="3d", grid=(2, 2, 1))), "llama", 3),
    (4, dict(tensor=dict(mode="2.5d", size=4, depth=4)), "llama", 3),
    (4, dict(tensor=2, sequence=MEGATRON, pipeline=2), "windowed llama", 3),
    (4, dict(tensor=dict(mode="3d", grid=(2, 1, 1)), pipeline=2), "gpt", 5),
    (4, dict(data=2, pipeline=2, zero=dict(stage=3)), "llama", 3),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("size", "parallel", "model", "rows"), CASES)
def test_ranks_write_the_text_of_one_process(size: int, parallel: dict[str, Any], model: str, rows: int) -> None:
    wanted = texts({}, model, rows, use_cache=False)[1:]
    for seen, *found in run_on_ranks(size, texts, parallel, model, rows):
        assert seen.tolist() == [1, 6]
        assert all(map(torch.equal, found, wanted))


def test_ranks_that_share_sequences_compute_them_anew() -> None:
    wanted = texts({}, "windowed llama", 2, use_cache=False)[1:]
    for seen, *found in run_on_ranks(2, texts, dict(sequence=RING), "windowed llama", 2):
        assert len(seen) > 2
        assert all(map(torch.equal, found, wanted))


def with_one_changed(parallel: dict[str, Any]) -> list[Tensor]:
    def make() -> Any:
        model = gpt()
        model.blocks[3].attn = Averaging()
        return model

    with Engine(make, parallel, precision="fp64") as engine:
        return [generate(engine.generator, prompt(2, 3), 6, temperature=0.0)]


def test_stages_agree_on_whether_keys_are_kept() -> None:
    wanted = with_one_changed({})
    for found in run_on_ranks(2, with_one_changed, dict(pipeline=2)):
        assert torch.equal(found[0], wanted[0])
