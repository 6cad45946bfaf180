"""One process: texts are those of transformers token by token, whatever else is in the batch, and pages come back."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from inference_models import FAMILIES, LONGEST, greedy, hugging_face, own, prompts
from torch import nn
from torch._dynamo.testing import CompileCounter

from meshfold.inference import Generator, Request, Sampling
from meshfold.inference import generator as generator_module
from meshfold.mesh import SpecError
from meshfold.models import attention_layers

GREEDY = Sampling(temperature=0.0, max_new_tokens=8)


def model_of(kind: str) -> Any:
    if kind in FAMILIES:
        return hugging_face(kind)
    name, _, window = kind.partition(" ")
    return own(name, window=5 if window else None).eval()


@pytest.mark.parametrize("kind", ["gpt", "gpt window", "llama of ours", *FAMILIES])
def test_greedy_texts_are_those_of_transformers(kind: str) -> None:
    model = own("llama").eval() if kind == "llama of ours" else model_of(kind)
    given = prompts(5)
    wanted = [greedy(model, prompt, 8) for prompt in given]
    assert (
        len({tuple(text) for text in wanted}) == 5 and len({word for text in wanted for word in text}) > 10
    )  # weights say something
    generator = Generator(model, page_size=4, most_rows=3, chunk=5)
    assert generator.paged, generator.reason
    found = generator.generate(given, sampling=GREEDY)
    assert found.tokens == wanted
    assert generator.scheduler.used_pages == 0
    for prompt, text, logprobs in zip(given, found.tokens, found.logprobs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1]
        exact = logits.log_softmax(-1).gather(1, torch.tensor(text)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(logprobs), exact, atol=2e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("ahead", [1, 5])
def test_requests_in_random_order_are_those_one_by_one(ahead: int) -> None:
    model = own("llama").eval()
    chance = random.Random(3)
    kinds = [
        dict(temperature=0.0),
        dict(temperature=0.8, top_k=20),
        dict(top_p=0.9, min_p=0.01),
        dict(temperature=1.3, repetition_penalty=1.3),
    ]
    wishes = [
        (prompt, Sampling(max_new_tokens=chance.randint(1, 12), seed=i, stop_tokens=(7, 8), **kinds[i % 4]))  # type: ignore[arg-type]
        for i, prompt in enumerate(prompts(32))
    ]
    alone = []
    for prompt, sampling in wishes:
        one = Generator(model, page_size=16, most_rows=1, chunk=64)
        request = one.submit(prompt, sampling)
        while one.busy:
            one.step()
        alone.append(request)
    # A pool that is too small for all, so that some are evicted.
    generator = Generator(model, tokens=72, page_size=4, most_rows=6, chunk=9, ahead=ahead)
    order = chance.sample(range(32), 32)
    found: dict[int, Request] = {}
    heard: dict[int, list[int]] = {}
    while order or generator.busy:
        while order and chance.random() < 0.4:
            i = order.pop()
            found[i] = generator.submit(*wishes[i])
        for piece in generator.step():
            heard.setdefault(piece.request.number, []).extend(piece.tokens)
    assert any(request.evictions for request in found.values())
    assert any(request.shared for request in found.values())
    for i, request in enumerate(alone):
        assert found[i].tokens == request.tokens == heard[found[i].number], i
        assert found[i].finish == request.finish
        assert found[i].logprobs == pytest.approx(request.logprobs, abs=2e-5)
    assert {r.finish for r in alone} == {"stop", "length"}
    assert generator.scheduler.used_pages == 0


@pytest.mark.parametrize("stops", [(), (7, 8)])
def test_tokens_behind_others_that_are_not_read_yet_are_the_same(
    stops: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences end by length or by a stop token, one is cancelled and two come later, while a group is being computed."""
    monkeypatch.setattr(generator_module, "_MANY", 1)
    model, given = own("llama").eval(), prompts(9)
    lengths = [3, 30, 17, 24, 9, 12, 20, 14, 6]
    found, launched = [], []
    for overlaps in (False, True):
        generator = Generator(model, page_size=4, most_rows=9, chunk=64, ahead=3)
        generator._overlaps = overlaps
        wishes = [Sampling(max_new_tokens=n, seed=n, stop_tokens=stops) for n in lengths]
        requests = [generator.submit(*each) for each in zip(given[:7], wishes, strict=False)]
        pieces: dict[int, list[int]] = {}
        for turn in range(60):
            if turn == 3:
                requests += [generator.submit(*each) for each in zip(given[7:], wishes[7:], strict=True)]
            if turn == 5:
                generator.cancel(requests[3])
            for piece in generator.step():
                pieces.setdefault(piece.request.number, []).extend(piece.tokens)
            launched.append(generator._group is not None)
            assert generator._group is None or overlaps
        assert not generator.busy and generator.scheduler.used_pages == 0 and generator._group is None
        assert all(pieces[request.number] == request.tokens for request in requests)
        assert [number for number, r in enumerate(requests) if r.finish == "cancelled"] == [3]
        found.append([r for r in requests if r.finish != "cancelled"])  # that one's length depends on the turn
    assert sum(launched) > (1 if stops else 3)
    for one, other in zip(*found, strict=True):
        assert (one.tokens, one.finish) == (other.tokens, other.finish)
        assert one.logprobs == pytest.approx(other.logprobs, abs=2e-5)
    assert {request.finish for request in found[0]} == ({"length", "stop"} if stops else {"length"})


@pytest.mark.parametrize("kind", ["gpt", "llama", "opt"])
@pytest.mark.parametrize("overlaps", [False, True])
def test_a_text_that_ends_at_the_last_position_does_not_run_beyond_it(kind: str, overlaps: bool) -> None:
    """Another goes on, and tokens that are dropped are computed with it: of positions that the model and the pages have."""
    model = hugging_face(kind) if kind in FAMILIES else own(kind).eval()
    longest = getattr(model.config, "max_positions", None) or model.config.max_position_embeddings
    wishes = [([1] * (longest - 3), 4), ([2, 3], longest - 1)]
    wanted = [greedy(model, prompt, count - 1) for prompt, count in wishes]  # the last token has no position
    generator = Generator(model, page_size=4, most_rows=4, ahead=5)
    generator._overlaps = overlaps
    requests = [generator.submit(ids, Sampling(temperature=0.0, max_new_tokens=count)) for ids, count in wishes]
    while generator.busy:
        generator.step()
    assert [len(request.tokens) for request in requests] == [count for _, count in wishes]
    assert [request.tokens[:-1] for request in requests] == wanted


def test_a_single_text_with_a_stop_token_computes_no_group_that_it_may_drop() -> None:
    generator = Generator(own("llama").eval(), ahead=2)
    generator._overlaps = True
    for stops, overlaps in (((7,), False), ((), True)):
        generator.submit([5, 6], Sampling(temperature=0.0, max_new_tokens=9, stop_tokens=stops))
        begun = []
        while generator.busy:
            generator.step()
            begun.append(generator._group is not None)
        assert any(begun) == overlaps


def test_a_request_does_not_change_with_its_neighbours() -> None:
    model = hugging_face("llama")
    mine, sampling = [5, 9, 11], Sampling(max_new_tokens=10, seed=77)
    texts = []
    for others in (0, 1, 4):
        generator = Generator(model, page_size=4)
        for number in range(others):
            generator.submit([3 + number] * (number + 1), Sampling(max_new_tokens=3 * number + 1, seed=77))
        texts.append([token for piece in generator.stream(mine, sampling) for token in piece.tokens])
        while generator.busy:
            generator.step()
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) == 10
    again = Generator(model).generate([mine] * 2, n=3, sampling=Sampling(max_new_tokens=10))
    assert len({tuple(text) for text in again.tokens}) == 6  # each has a seed of its own
    assert (
        again.tokens
        == Generator(model, most_rows=2).generate([mine] * 2, n=3, sampling=Sampling(max_new_tokens=10)).tokens
    )


def test_the_pool_takes_the_stated_bytes() -> None:
    for kind, kv_heads, d in (("llama", 2, 8), ("qwen3", 2, 16), ("opt", 4, 8)):
        generator = Generator(hugging_face(kind), tokens=40, page_size=8)
        # 2 · (pages + 1) · size · layers · kv_heads · d in float32
        assert generator.bytes == 2 * 6 * 8 * 2 * kv_heads * d * 4
    assert Generator(own("gpt").double(), page_size=16, most_rows=2).bytes == 2 * (2 * 3 + 1) * 16 * 2 * 4 * 8 * 8


def test_prompts_that_begin_alike_are_computed_once() -> None:
    model, seen = own("gpt").eval(), []
    hook = model.embed.register_forward_pre_hook(lambda module, args: seen.append(args[0].numel()))
    generator = Generator(model, page_size=4)
    seen.clear()
    generator.generate([list(range(3, 16))], n=8, sampling=Sampling(max_new_tokens=2))
    assert seen == [13 + 7, 8]
    hook.remove()


def test_stop_strings_end_a_text_and_are_cut_off() -> None:
    model = own("llama").eval()

    def decode(ids: list[int]) -> str:
        return "".join(chr(97 + token % 26) for token in ids)

    generator = Generator(model, decode=decode)
    [free] = generator.complete([[5, 6]], sampling=Sampling(temperature=0.0, max_new_tokens=12))
    assert free.text == decode(free.tokens) and free.finish == "length"
    stop = free.text[5:7]
    first = free.text.find(stop)
    [cut] = generator.complete([[5, 6]], sampling=Sampling(temperature=0.0, max_new_tokens=12, stop=("??", stop)))
    assert (cut.text, cut.finish) == (free.text[:first], "stop")
    assert cut.tokens == free.tokens[: first + 2]
    assert generator.scheduler.used_pages == 0


@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt", marks=pytest.mark.slow)])
def test_compiled_blocks_write_the_same_texts(kind: str) -> None:
    model = own("gpt", layers=3).eval() if kind == "gpt" else hugging_face(kind, num_hidden_layers=3)
    counter = CompileCounter()
    generator = Generator(model, page_size=4, most_rows=2, compile=counter)
    given = prompts(3)
    assert generator.generate(given, sampling=GREEDY).tokens == [greedy(model, prompt, 8) for prompt in given]
    assert all("forward" not in vars(module) for module in model.modules())
    # Batches of one row and of two. All blocks share their code, which is one graph.
    assert counter.frame_count == 2


def test_the_model_is_left_as_it_was() -> None:
    model = hugging_face("mistral").train()
    before = model.config._attn_implementation
    generator = Generator(model)
    stream = generator.stream([4, 5], GREEDY)
    next(stream)
    assert model.config._attn_implementation == before and model.training and not model.lm_head._forward_pre_hooks
    stream.close()
    assert not generator.busy and generator.scheduler.used_pages == 0
    ours = own("gpt").train()
    ours.blocks[0].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Generator(ours)
    assert ours.training and all(layer.attend is None for layer in attention_layers(ours))


def test_a_failed_step_drops_its_requests_and_their_pages() -> None:
    model = own("gpt").eval()
    generator = Generator(model, page_size=4)
    request = generator.submit([3, 4, 5], GREEDY)
    generator.step()
    hook = model.norm.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generator.step()
    hook.remove()
    assert request.finish == "cancelled" and generator.scheduler.used_pages == 0
    assert generator.generate([[3, 4, 5]], sampling=GREEDY).tokens == [greedy(model, [3, 4, 5], 8)]


def test_new_weights_are_used_at_once() -> None:
    model = own("llama").eval()
    generator = Generator(model, page_size=2)
    first = generator.generate([[3, 4, 5, 6]], sampling=GREEDY)
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight.mul_(-1)
    generator.new_weights()
    second = generator.generate([[3, 4, 5, 6]], sampling=GREEDY)
    assert (first.version, second.version) == (0, 1)
    assert second.tokens == [greedy(model, [3, 4, 5, 6], 8)] != first.tokens
    generator.submit([3], GREEDY)
    with pytest.raises(SpecError, match="while requests run"):
        generator.new_weights()


class Shifted(nn.Module):
    """Ours, with tokens mixed by something else too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner, self.weight = model, nn.Parameter(torch.ones(()))

    def forward(self, ids: torch.Tensor) -> Any:
        return self.inner(ids).logits


def test_a_model_without_pages_gives_the_same_texts() -> None:
    given, sampling = prompts(4), Sampling(max_new_tokens=6, seed=2)
    inner = own("llama").eval()
    wanted = Generator(inner).generate(given, n=2, sampling=sampling)
    generator = Generator(Shifted(inner), most_rows=3)
    assert not generator.paged and "neither" in generator.reason and generator.bytes == 0
    assert generator.generate(given, n=2, sampling=sampling).tokens == wanted.tokens

    mixing = hugging_face("llama")
    mixing.model.layers[0].mlp.register_forward_hook(lambda module, args, y: y + 3 * y.roll(1, 1))
    generator = Generator(mixing)
    assert not generator.paged and "something besides causal attention" in generator.reason


def test_requests_are_checked() -> None:
    generator = Generator(own("gpt"), tokens=64, page_size=8, most_rows=2)
    with pytest.raises(SpecError, match=rf"has {LONGEST} positions; write a shorter prompt"):
        generator.submit([1] * (LONGEST + 1), Sampling(max_new_tokens=1))
    with pytest.raises(SpecError, match=rf"has {LONGEST} positions; write max_new_tokens={LONGEST - 9}"):
        generator.submit(range(10), Sampling(max_new_tokens=LONGEST))
    with pytest.raises(SpecError, match=r"decode=tokenizer\.decode"):
        generator.submit([1], Sampling(stop=("x",), max_new_tokens=1))
    with pytest.raises(SpecError, match="a prompt"):
        generator.generate([[1], []], sampling=GREEDY)
    assert not generator.busy  # the first of them was cancelled
    with pytest.raises(SpecError, match="less than a page"):
        Generator(own("gpt"), tokens=7, page_size=8)


def test_what_is_no_prompt_or_model_is_said() -> None:
    generator = Generator(own("llama"), tokens=64)
    for wrong in ([1, 2, 3], ["hello"]):
        with pytest.raises(SpecError, match=r"give lists of token ids, \[\[1, 2, 3\], ...\]"):
            generator.generate(wrong)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="give a model, or the generator of an Engine"):
        Generator("folder")
