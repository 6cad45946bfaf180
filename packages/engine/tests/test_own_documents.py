"""Our GPT and Llama with documents packed into rows and a sliding window: as each document alone, under every spec."""

from __future__ import annotations

import math
import re
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshfold.checkpoint import CheckpointError
from meshfold.engine import Engine, plan_memory
from meshfold.huggingface import decoder_configs, decoder_names
from meshfold.mesh import LayoutError, Mesh, SpecError
from meshfold.mesh.testing import fake_world, run_on_ranks
from meshfold.models import GPT, GPTConfig, Llama, LlamaConfig, build, generate
from meshfold.sequence import sequence_parallel

VOCABULARY, LENGTH, WINDOW = 37, 13, 4
SIZES: dict[str, Any] = dict(vocab_size=VOCABULARY, hidden=32, layers=2, heads=4)
PACKS: dict[str, list[list[int]]] = {
    "one row": [[4, 1, 8]],
    "alike": [[6, 7], [6, 7]],
    "each row its own": [[4, 9], [13], [1, 7, 5]],
}
"""lengths of the documents of each row"""


def gpt(window: int | None = None, dropout: float = 0.0) -> nn.Module:
    return GPT(GPTConfig(**SIZES, max_positions=13, window=window, dropout=dropout))


def llama(window: int | None = None, dropout: float = 0.0) -> nn.Module:
    return Llama(LlamaConfig(**SIZES, kv_heads=2, ffn=48, window=window, dropout=dropout))


MODELS = {"gpt": gpt, "llama": llama}


def packed(pack: str, rows: int | None = None) -> dict[str, Tensor]:
    lengths = PACKS[pack]
    ids = torch.randint(VOCABULARY, (len(lengths), LENGTH), generator=torch.Generator().manual_seed(5))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    return dict(input_ids=ids, position_ids=positions[:rows])


def seen_by_hand(length: int, window: int | None) -> Tensor:
    """What is added to the scores of one document, written down pair by pair."""
    rows = [
        [0.0 if j <= i and (window is None or i - j < window) else -math.inf for j in range(length)]
        for i in range(length)
    ]
    return torch.tensor(rows, dtype=torch.float64)


class ByHand(nn.Module):
    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window = window

    def forward(self, positions: Tensor | None, like: Tensor, length: int) -> Tensor:
        assert positions is None
        return seen_by_hand(length, self.window)


def alone(model: str, pack: str, window: int | None) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the documents one by one, each a sequence of its own, masked by hand."""
    with Engine(lambda: MODELS[model](window), {}, precision="fp64", seed=3) as engine:
        whole = engine.model
        whole.mask = ByHand(window)
        total, counted = torch.zeros((), dtype=torch.float64), 0
        for ids, lengths in zip(packed(pack)["input_ids"], PACKS[pack], strict=True):
            for start, stop in pairwise([0, *accumulate(lengths)]):
                document = ids[None, start:stop]
                if (count := stop - start - 1) > 0:
                    total = total + whole(document, labels=document).loss * count
                    counted += count
        names = dict(whole.named_parameters())
        found = torch.autograd.grad(total / counted, list(names.values()))
        return float(total.detach()) / counted, dict(zip(names, found, strict=True))


def stepped(
    parallel: dict[str, Any],
    model: str,
    pack: str,
    window: int | None,
    rows: int | None = None,
    settings: dict[str, Any] | None = None,
    dropout: float = 0.0,
) -> tuple[float, float, dict[str, Tensor]]:
    """Losses of an evaluation and a step, and the gradient of every parameter: what SGD with lr 1 takes off it."""
    settings = {"optimizer": dict(name="sgd", lr=1.0), "precision": "fp64", "seed": 3} | (settings or {})
    with Engine(lambda: MODELS[model](window, dropout), parallel, **settings) as engine:
        before = engine.full_state_dict()
        batch = engine.shard_batch(packed(pack, rows))
        losses = engine.eval_step(batch), engine.train_step(batch)
        after = engine.full_state_dict()
        return *losses, {name: before[name] - after[name] for name in before}


def check(found: Any, wanted: tuple[float, dict[str, Tensor]], what: object) -> None:
    loss, gradients = wanted
    assert found[0] == pytest.approx(loss, rel=1e-9), what
    assert found[1] == pytest.approx(loss, rel=1e-9), what
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    assert largest > 1e-3
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            found[2][name],
            gradient,
            rtol=0,
            atol=1e-9 * largest,
            msg=lambda text, name=name: f"{what}, {name}: {text}",
        )


def ring(size: int) -> dict[str, Any]:
    return dict(mode="ring", size=size)


ONE: dict[str, Any] = {}
TWO: list[dict[str, Any]] = [
    dict(data=2),
    dict(sequence=ring(2)),
    dict(sequence=dict(mode="ulysses", size=2)),
    dict(tensor=2, sequence=dict(mode="megatron")),
    dict(pipeline=2),
]
FOUR: list[dict[str, Any]] = [
    dict(sequence=ring(4)),
    dict(sequence=dict(mode="ring_ulysses", size=4, ulysses=2)),
    dict(tensor=dict(mode="2d", size=4)),
    dict(tensor=dict(mode="3d", grid=(2, 2, 1))),
    dict(tensor=dict(mode="2d", grid=(2, 1)), sequence=ring(2)),
    dict(pipeline=dict(size=2, schedule="1f1b", microbatches=3), sequence=ring(2)),
    dict(data=2, sequence=ring(2), zero=dict(stage=3)),
]
MORE: list[dict[str, Any]] = [
    dict(tensor=dict(mode="2.5d", size=4, depth=1)),
    dict(tensor=dict(mode="3d", grid=(1, 2, 2))),
    dict(tensor=2, sequence=ring(2)),
    dict(pipeline=2, tensor=dict(mode="2d", grid=(2, 1))),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("model", "window"),
    [("gpt", None), pytest.param("gpt", WINDOW, marks=pytest.mark.slow), ("llama", WINDOW)],
)
def test_packed_documents_are_as_each_alone(model: str, window: int | None) -> None:
    for pack in PACKS:
        wanted = alone(model, pack, window)
        check(stepped(ONE, model, pack, window), wanted, pack)
        specs = [dict(sequence=ring(2))] if pack == "alike" else TWO[1:4] if pack == "one row" else TWO
        for parallel in specs:
            for found in run_on_ranks(2, stepped, parallel, model, pack, window):
                check(found, wanted, (pack, parallel))


def named(parallel: dict[str, Any]) -> str:
    return re.sub(r"[^\w.]+", "-", str(parallel)).strip("-")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "parallel",
    [
        *(pytest.param(parallel, id=named(parallel)) for parallel in FOUR),
        *(pytest.param(parallel, id=named(parallel), marks=pytest.mark.slow) for parallel in MORE),
    ],
)
def test_packed_documents_on_four_ranks(parallel: dict[str, Any]) -> None:
    model = "gpt" if "tensor" in parallel else "llama"
    wanted = alone(model, "each row its own", WINDOW)
    for found in run_on_ranks(4, stepped, parallel, model, "each row its own", WINDOW):
        check(found, wanted, parallel)


def test_positions_of_one_row_are_those_of_all() -> None:
    wanted = alone("gpt", "alike", None)
    check(stepped(ONE, "gpt", "alike", None, 1), wanted, "one process")
    for parallel in (
        dict(sequence=ring(2)),
        dict(tensor=dict(mode="2d", grid=(2, 1))),
        dict(pipeline=2),
        dict(data=2),
    ):
        for found in run_on_ranks(2, stepped, parallel, "gpt", "alike", None, 1):
            check(found, wanted, parallel)


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.2])
def test_dropout_and_recomputed_blocks(dropout: float) -> None:
    settings = dict(recompute="blocks")
    evaluated, loss, gradients = stepped(ONE, "llama", "each row its own", WINDOW, dropout=dropout)
    if dropout:
        assert loss != pytest.approx(evaluated, rel=1e-6)
    for parallel in (dict(sequence=ring(2)), dict(pipeline=2), dict(tensor=2)):
        for found in run_on_ranks(2, stepped, parallel, "llama", "each row its own", WINDOW, None, settings, dropout):
            assert found[:2] == pytest.approx((evaluated, loss), rel=1e-9), (parallel, dropout)
            for name, value in gradients.items():
                torch.testing.assert_close(found[2][name], value, rtol=0, atol=1e-9)


def own_loop(parallel: dict[str, Any]) -> tuple[float, float, dict[str, Tensor]]:
    settings: dict[str, Any] = dict(optimizer=dict(name="sgd", lr=1.0), precision="fp64", seed=3)
    with Engine(lambda: gpt(WINDOW), parallel, **settings) as engine:
        before = engine.full_state_dict()
        batch = packed("each row its own")
        loss = engine(batch["input_ids"], batch["input_ids"], batch["position_ids"]).loss
        engine.backward(loss)
        engine.step()
        after = engine.full_state_dict()
        return (
            float(loss.detach()),
            float(loss.detach()),
            {name: before[name] - after[name] for name in before},
        )


def test_a_loop_of_ones_own() -> None:
    wanted = alone("gpt", "each row its own", WINDOW)
    check(own_loop({}), wanted, "one process")
    for found in run_on_ranks(2, own_loop, dict(sequence=ring(2))):
        check(found, wanted, "ring")


def test_a_window_alone() -> None:
    """Without positions: a row is one document, and what is generated sees the window too."""
    ids = packed("one row")["input_ids"]
    model = llama(WINDOW).double()
    by_hand = llama().double()
    by_hand.load_state_dict(model.state_dict())
    by_hand.mask = ByHand(WINDOW)
    torch.testing.assert_close(model(ids).logits, by_hand(ids).logits, rtol=1e-12, atol=1e-12)
    far, near = ids.clone(), ids.clone()
    far[0, LENGTH - 1 - 2 * (WINDOW - 1) - 1] += 1  # two layers see no further back than this
    near[0, LENGTH - 1 - 2 * (WINDOW - 1)] += 1
    last = [model(x % VOCABULARY).logits[0, -1] for x in (ids, far, near)]
    assert torch.equal(last[0], last[1]) and not torch.allclose(last[0], last[2], rtol=1e-6, atol=1e-6)


# -- Mistral -----------------------------------------------------------------------------------------------------------


def mistral() -> Any:
    import transformers as hf

    torch.manual_seed(0)
    config = hf.MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=48,
        sliding_window=WINDOW,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return hf.MistralForCausalLM(config).double().eval()


def taken_over(theirs: Any) -> nn.Module:
    config = decoder_configs.ours_of(theirs.config.to_dict())
    state = theirs.state_dict()
    model = build(config).double().eval()
    made: dict[str, Tensor] = {}
    for step in decoder_names.enter(state, config):
        made |= dict(zip(step.results, step.make([state[name] for name in step.sources]), strict=True))
    model.load_state_dict(made)
    return model


@pytest.mark.filterwarnings("ignore")
def test_a_mistral_is_a_llama_with_a_window() -> None:
    theirs = mistral()
    ours = taken_over(theirs)
    assert ours.config.window == WINDOW
    batch = packed("one row")
    with torch.no_grad():
        for given in (dict(input_ids=batch["input_ids"]), batch):
            # Their rotary tables are computed in float32 as well, in another order.
            torch.testing.assert_close(
                ours(**given).logits, theirs(**given, use_cache=False).logits, rtol=1e-5, atol=1e-5
            )
    prompt = batch["input_ids"][:, :3]
    # Their cache keeps no more than a window.
    told = theirs.generate(prompt, max_new_tokens=12, do_sample=False, use_cache=True)
    assert torch.equal(generate(ours, prompt, 12, temperature=0.0), told)

    back = decoder_configs.theirs_of(ours.config)
    assert (back["model_type"], back["architectures"], back["sliding_window"]) == (
        "mistral",
        ["MistralForCausalLM"],
        WINDOW,
    )
    assert decoder_configs.ours_of(back) == ours.config
    assert decoder_configs.ours_of({**back, "sliding_window": None}).window is None
    assert decoder_configs.ours_of({k: v for k, v in back.items() if k != "sliding_window"}).window == 4096
    with pytest.raises(CheckpointError, match="no sliding window, and this model has window=4"):
        decoder_configs.theirs_of(gpt(WINDOW).config)


# -- plans, and what is refused ------------------------------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "parallel",
    [{}, dict(sequence=ring(2)), dict(pipeline=2), dict(tensor=dict(mode="2d", size=4))],
    ids=["one", "ring", "pipeline", "2d"],
)
def test_plans_count_the_mask_that_is_made(parallel: dict[str, Any]) -> None:
    length = 64

    def activations(window: int | None) -> int:
        model = lambda: build("gpt-tiny", window=window)  # noqa: E731
        return plan_memory(model, parallel, batch_size=4, seq_len=length).activations

    more = activations(8) - activations(None)
    if "sequence" in parallel:
        assert more == 0  # none is made
    else:
        assert more >= length * length * 4  # one for all layers


IDS = torch.zeros(2, 6, dtype=torch.int64)
SECOND = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 5, 6]])
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (gpt, dict(position_ids=SECOND), "position_ids of row 1 have 5 at token 4"),
    (
        gpt,
        dict(position_ids=torch.stack((torch.arange(6), torch.arange(3, 9)))),
        "of row 1 have 3 at token 0",
    ),
    (llama, dict(position_ids=SECOND[:, 1:]), r"position_ids \[2, 5\] for tokens \[2, 6\]"),
    (llama, dict(position_ids=torch.arange(3, 9)[None]), "row 0 have 3 at token 0"),
    (
        lambda: GPT(GPTConfig(**SIZES, max_positions=3)),
        dict(position_ids=torch.tensor([[0, 1, 0, 1, 2, 3]])),
        "row 0 has a document of 4 tokens, but the model has only 3 learned positions",
    ),
    (llama, dict(cu_seq_lens_q=torch.tensor([0, 2, 6])), "give position_ids that restart"),
]


@pytest.mark.parametrize(("model", "given", "message"), REFUSED, ids=[row[-1][:40] for row in REFUSED])
@pytest.mark.parametrize("ranks", [1, 2])
def test_documents_that_are_none_are_refused_before_anything_runs(
    model: Any, given: dict[str, Any], message: str, ranks: int
) -> None:
    parallel: dict[str, Any] = {} if ranks == 1 else dict(sequence=ring(2))
    with fake_world(ranks):
        engine = Engine(model, parallel, precision="fp64", optimizer="sgd")
        with pytest.raises(SpecError, match=message):
            engine.train_step(dict(input_ids=IDS, **given))
        assert engine.micro_step == 0
        engine.close()


@pytest.mark.parametrize("window", [0, -1, 2.0, True])
def test_windows_that_are_none_are_refused(window: Any) -> None:
    with pytest.raises(SpecError, match=r"window=.*a whole number from 1 up"):
        LlamaConfig(**SIZES, window=window)


def test_a_model_called_directly_checks_shapes() -> None:
    for wrong in (SECOND[:, :4], SECOND[:1, :4], SECOND.double(), SECOND.repeat(2, 1)):
        with pytest.raises(SpecError, match="give integers, one a token"):
            llama()(IDS, position_ids=wrong)


def test_a_split_sequence_has_one_window() -> None:
    model = build("llama-tiny", window=4)
    model.mask2 = type(model.mask)(5)
    with pytest.raises(LayoutError, match=r"have the windows \['4', '5'\]"):
        sequence_parallel(model, Mesh({}), "ring")
    del model.mask2
    changed = sequence_parallel(model, Mesh({}), "ring")
    assert model.mask(None, torch.zeros(1), 9) is None
    changed.remove()
    assert model.mask(None, torch.zeros(1), 9) is not None
