"""The engine under any spec does what a plain PyTorch loop does to one model with the whole batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.engine import Engine, TrainingError
from meshfold.mesh import Mesh, SpecError, barrier
from meshfold.mesh.testing import ranks, run_on_ranks
from meshfold.models import GPT, GPTConfig, Llama, LlamaConfig

VOCABULARY = 37  # divides by nothing
SIZES: dict[str, Any] = dict(vocab_size=VOCABULARY, hidden=32, layers=2, heads=4, max_positions=16)
ADAMW: dict[str, Any] = dict(name="adamw", lr=1e-2, weight_decay=0.1)


def gpt() -> GPT:
    return GPT(GPTConfig(**SIZES))


def untied_gpt() -> GPT:
    return GPT(GPTConfig(**SIZES, tie=False))


def llama() -> Llama:
    return Llama(LlamaConfig(**SIZES, kv_heads=2, ffn=48))


MODELS = {"gpt": gpt, "untied_gpt": untied_gpt, "llama": llama}


def global_batches(rows: int, count: int, length: int = 8) -> list[dict[str, Tensor]]:
    """Batches whose rows have different numbers of labels that count."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(count):
        ids = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
        labels = ids.clone()
        for row in range(rows):
            labels[row, torch.randperm(length, generator=generator)[: row % length]] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return batches


@functools.cache
def initial_weights(model: str) -> dict[str, Tensor]:
    return Engine(MODELS[model], dict(data=1) if _alone() else _spec_of_everyone(), precision="fp64").full_state_dict()


def _alone() -> bool:
    return not torch.distributed.is_initialized()


def _spec_of_everyone() -> dict[str, int]:
    return dict(data=torch.distributed.get_world_size())


@functools.cache
def serial(
    model: str, rows: int, steps: int, accumulation: int = 1, clip: float | None = None
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, gradient norms and final weights of a plain loop in float64, from the engine's initial weights."""
    plain = MODELS[model]().double()
    plain.load_state_dict(initial_weights(model))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    losses, norms = [], []
    for number, batch in enumerate(global_batches(rows, steps * accumulation)):
        logits = plain(batch["input_ids"]).logits
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), batch["labels"][:, 1:].reshape(-1))
        (loss / accumulation).backward()
        losses.append(loss.item())
        if number % accumulation == accumulation - 1:
            norms.append(float(nn.utils.clip_grad_norm_(plain.parameters(), clip or math.inf)))
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms, plain.state_dict()


def compare(
    model: str,
    parallel: dict[str, Any],
    rows: int,
    steps: int = 2,
    accumulation: int = 1,
    clip: float | None = None,
) -> None:
    losses, norms, weights = serial(model, rows, steps, accumulation, clip)
    with Engine(
        MODELS[model],
        parallel,
        optimizer=ADAMW,
        precision="fp64",
        gradient_accumulation=accumulation,
        clip_grad_norm=clip,
    ) as engine:
        for number, batch in enumerate(global_batches(rows, steps * accumulation)):
            assert engine.train_step(engine.shard_batch(batch)) == pytest.approx(losses[number], rel=1e-10), parallel
            assert engine.last is not None
            assert engine.last.tokens == int((batch["labels"][:, 1:] != -100).sum())
            assert engine.last.stepped == (number % accumulation == accumulation - 1)
            if engine.last.stepped:
                assert engine.last.grad_norm == pytest.approx(norms[engine.steps - 1], rel=1e-9), parallel
        assert (engine.steps, engine.micro_step) == (steps, steps * accumulation)
        found = engine.full_state_dict()
    assert list(found) == list(weights)
    for name, value in weights.items():
        assert found[name].dtype == value.dtype
        torch.testing.assert_close(
            found[name], value, rtol=1e-7, atol=1e-9, msg=lambda text, n=name: f"{parallel} {n}: {text}"
        )


def test_one_process_is_a_plain_loop() -> None:
    for model in MODELS:
        compare(model, {}, rows=5)


@ranks(2)
def test_two_data_ranks_are_the_serial_model() -> None:
    compare("gpt", dict(data=2), rows=6, accumulation=2, clip=0.5)
    compare("llama", {}, rows=5)  # uneven rows; data is inferred


@ranks(4)
def test_four_data_ranks_are_the_serial_model() -> None:
    compare("untied_gpt", dict(data=4), rows=9)
    compare("gpt", dict(data=4), rows=3)  # one rank has no row
    compare("gpt", dict(data=4), rows=7, accumulation=3, steps=2, clip=0.1)


SPECS_OF_4: list[dict[str, Any]] = [
    dict(tensor=4),
    dict(tensor=4, sequence=dict(mode="megatron")),
    dict(tensor=dict(mode="2d", size=4)),
    dict(tensor=dict(mode="2d", grid=(1, 4))),
    dict(tensor=dict(mode="2.5d", size=4, depth=1)),
    dict(tensor=dict(mode="3d", grid=(2, 2, 1))),
    dict(data=2, tensor=2),
    dict(data=2, tensor=2, sequence=dict(mode="megatron")),
    dict(data=2, tensor=dict(mode="2d", grid=(2, 1))),
]


@pytest.mark.parametrize("rest", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "rest"])
@ranks(4)
def test_four_ranks_in_every_tensor_mode_are_the_serial_model(rest: bool) -> None:
    """Each mode, and one of them beside data; the slow test has the other grids and mixtures."""
    for number, parallel in enumerate(SPECS_OF_4):
        if (number not in (1, 2, 5, 6)) != rest:  # 2.5d is in the test on eight ranks
            continue
        model = ("gpt", "llama", "untied_gpt")[number % 3]
        # 5 rows: filled up, inside, to what the mode can split.
        compare(model, parallel, rows=8 if number % 2 else 5, clip=0.5 if number % 2 else None)


@pytest.mark.parametrize(
    "parallel",
    [
        dict(tensor=dict(mode="2.5d", size=8, depth=2)),
        pytest.param(dict(data=2, tensor=dict(mode="2d", size=4)), marks=pytest.mark.slow),
    ],
    ids=["2.5d", "data × 2d"],
)
@ranks(8)
def test_eight_ranks_are_the_serial_model(parallel: dict[str, Any]) -> None:
    compare("llama", parallel, rows=8, steps=1, accumulation=2, clip=0.5)


class TwoPaths(nn.Module):
    """Uses one of its layers according to the batch, another never."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.left(x) if x[0, 0] > 0 else self.right(x)
        return y


def mean_square(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(output.to(batch[1].dtype), batch[1])  # torch 2.11 has no backward for two dtypes


@ranks(2)
def test_layers_that_some_or_all_ranks_leave_out_take_part_as_in_a_single_process() -> None:
    torch.manual_seed(torch.distributed.get_rank())  # ranks disagree: rank 0's weights are used
    model = TwoPaths().double()
    engine = Engine(model, dict(data=2), optimizer=dict(name="adamw", lr=0.1), precision="fp64", loss_fn=mean_square)
    torch.manual_seed(0)
    plain = TwoPaths().double()
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    x[:2, 0], x[2:, 0] = 1.0, -1.0
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for step in range(3):
        # In the last step no rank takes the right path: its momentum must rest, not decay.
        x[2:, 0] = 1.0 if step == 2 else -1.0
        optimizer.zero_grad()
        loss = (F.mse_loss(plain(x[:2]), y[:2]) + F.mse_loss(plain(x[2:]), y[2:])) / 2
        loss.backward()
        optimizer.step()
        assert engine.train_step(engine.shard_batch((x, y))) == pytest.approx(loss.item(), rel=1e-12)
    for name, value in engine.full_state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-10, atol=1e-12, msg=name)
    torch.testing.assert_close(plain.never.weight, never_weight(), rtol=0, atol=0)


def never_weight() -> Tensor:
    torch.manual_seed(0)
    return TwoPaths().double().never.weight


@ranks(2)
def test_pairs_weigh_by_their_rows_and_classes() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    x, y = torch.randn(7, 3, dtype=torch.float64), torch.tensor([0, 1, -100, 3, 2, -100, -100])
    engine = Engine(
        nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4)),
        dict(data=2),
        optimizer=torch.optim.SGD,
        precision="fp64",
        loss_fn=lambda output, batch: F.cross_entropy(output, batch[1]),
    )
    engine.load_state_dict(plain.state_dict())
    loss = F.cross_entropy(plain(x), y)
    loss.backward()
    torch.optim.SGD(plain.parameters()).step()
    assert engine.eval_step(engine.shard_batch((x, y))) == pytest.approx(loss.item(), rel=1e-12)
    assert engine.train_step(engine.shard_batch((x, y))) == pytest.approx(loss.item(), rel=1e-12)
    for name, value in engine.full_state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-12, atol=1e-14)
    assert math.isnan(engine.eval_step(engine.shard_batch((x, torch.full_like(y, -100)))))


@ranks(2)
def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    precision = dict(name="fp16", initial_scale=2.0**10, growth_interval=2, growth_factor=4.0)
    engine = Engine(
        functools.partial(_tiny_linear, 1),
        dict(data=2),
        optimizer=dict(name="sgd", lr=0.1),
        precision=precision,
        loss_fn=mean_square,
    )
    rank = torch.distributed.get_rank()
    good = (torch.ones(2, 4), torch.zeros(2, 1))
    bad = (torch.full((2, 4), 3e4 if rank == 1 else 1.0), torch.zeros(2, 1))
    before = engine.full_state_dict()
    engine.train_step(bad)
    assert engine.last is not None
    assert (engine.last.skipped, engine.last.skipped_steps, engine.last.loss_scale, engine.steps) == (
        True,
        1,
        2.0**9,
        0,
    )
    assert all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items())
    engine.train_step(good)
    engine.train_step(good)
    assert (engine.last.skipped, engine.skipped_steps, engine.last.loss_scale, engine.steps) == (
        False,
        1,
        2.0**11,
        2,
    )
    # The gradient of mean((w·1)²) with w all 0.5, unscaled: 2 · 2 · 1 in each of 4 elements; then 4 (1 - 0.8).
    master = engine.full_state_dict()["weight"]
    assert master.dtype == torch.float32
    torch.testing.assert_close(master, torch.full((1, 4), 0.5 - 0.4 - 0.08), rtol=2e-3, atol=1e-4)
    assert {p.dtype for p in engine.model.parameters()} == {torch.float16}


def test_a_loss_function_is_given_the_batch_in_its_own_form() -> None:
    seen: list[Any] = []

    def loss_fn(output: Tensor, batch: Any) -> Tensor:
        seen.append(batch)
        return output.mean()

    ids = torch.arange(6).view(2, 3)
    engine = Engine(nn.Sequential(nn.Embedding(6, 2)), optimizer="sgd", loss_fn=loss_fn)
    engine.train_step(ids)
    engine.train_step({"input_ids": ids})
    engine.train_step((ids, [1, 2]))
    assert torch.equal(seen[0], ids)
    assert list(seen[1]) == ["input_ids"]
    assert torch.equal(seen[2][0], ids) and seen[2][1] == [1, 2]


def _tiny_linear(out: int) -> nn.Linear:
    made = nn.Linear(4, out, bias=False)
    nn.init.constant_(made.weight, 0.5)
    return made


def test_the_loss_scale_shrinks_grows_and_has_a_floor() -> None:
    from meshfold.engine.precision import LossScaler, ScaleSettings

    scaler = LossScaler(ScaleSettings(initial_scale=4.0, growth_interval=3, hysteresis=2, min_scale=2.0))
    assert [scaler.update(norm) for norm in (math.inf, math.nan)] == [True, True]
    assert scaler.scale == 2.0
    assert [scaler.update(norm) for norm in (math.inf, -math.inf, 1.0, 1.0)] == [True, True, False, False]
    assert scaler.scale == 2.0
    other = LossScaler(ScaleSettings())
    other.load_state_dict(scaler.state_dict())
    assert not other.update(1.0)
    assert not scaler.update(1.0)
    assert (scaler.scale, other.scale) == (4.0, 2.0)


@ranks(2)
def test_bf16_keeps_float32_masters_that_learn_from_small_updates() -> None:
    engine = Engine(
        functools.partial(_tiny_linear, 2),
        dict(data=2),
        optimizer=dict(name="sgd", lr=1e-4),
        precision="bf16",
        loss_fn=mean_square,
        gradient_accumulation=2,
    )
    batch = (torch.ones(2, 4), torch.ones(2, 2))
    for _ in range(8):
        engine.train_step(batch)
    # Each step moves a weight by lr · 2 (2 - 1) / 2 = 1e-4, which bfloat16 cannot see beside 0.5.
    torch.testing.assert_close(engine.full_state_dict()["weight"], torch.full((2, 4), 0.5 - 4e-4), rtol=0, atol=2e-6)
    assert torch.equal(engine.model.weight.float(), torch.full((2, 4), 0.5))  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("rest", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "rest"])
@ranks(4)
def test_bf16_and_fp16_train_under_tensor_parallelism_and_replicas_stay_equal(rest: bool) -> None:
    """Each precision with one of the two specs; the slow test has the other one."""
    specs: tuple[dict[str, Any], ...] = (dict(data=2, tensor=2), dict(tensor=dict(mode="2d", size=4)))
    for precision, some in (("bf16", specs[:1]), ("fp16", specs[1:])):
        for parallel in specs if rest else some:
            engine = Engine(llama, parallel, optimizer=ADAMW, precision=precision, clip_grad_norm=1.0)
            losses = [engine.train_step(engine.shard_batch(global_batches(8, 1)[0])) for _ in range(6)]
            assert losses[-1] < losses[0] - 0.5, (precision, parallel, losses)
            norm = engine.model.get_parameter("norm.weight").detach()
            meta = Mesh(dict(all=4))
            from meshfold.mesh import all_gather, metadata

            placement = metadata(engine.model.get_parameter("norm.weight"))
            assert placement is not None
            everywhere = all_gather(norm.view(1, -1), meta.group("all"), 0)
            same = [
                r
                for r in range(4)
                if placement.placement.segments(engine.mesh, 0, r) == placement.placement.segments(engine.mesh, 0)
            ]
            assert all(torch.equal(everywhere[r], norm) for r in same)
            engine.close()


def _losses(model: Callable[[], nn.Module], parallel: dict[str, Any], rows: int) -> list[float]:
    with Engine(model, parallel, optimizer=ADAMW, precision="fp64", seed=7) as engine:
        batches = global_batches(rows, 2)  # so that a step's numbers are seen not to be those of the one before
        if rows == 8:
            once, again = (engine.eval_step(engine.shard_batch(batches[0])) for _ in range(2))
            assert once == again
        return [engine.train_step(engine.shard_batch(batch)) for batch in batches]


DROPPING = {"gpt": lambda: _dropping(), "gpt2": lambda: _dropping_gpt2()}
CASES = [("gpt", 8), ("gpt", 7), ("gpt", 3), ("gpt2", 7)]  # rows: even; uneven; fewer than data coordinates


DROPPING_SPECS: dict[int, list[dict[str, Any]]] = {
    2: [dict(data=2), dict(tensor=2)],
    4: [
        dict(data=4),
        dict(data=2, tensor=2, sequence=dict(mode="megatron")),
        dict(data=2, tensor=dict(mode="2d", grid=(2, 1))),
        dict(tensor=dict(mode="2d", size=4)),
    ],
    8: [dict(data=2, tensor=dict(mode="2d", size=4))],
}


@functools.cache
def _serial_dropping() -> dict[tuple[str, int], list[float]]:
    return {(name, rows): _losses(DROPPING[name], {}, rows) for name, rows in CASES}


def _compare_dropping(serial: dict[tuple[str, int], list[float]], pairs: list[tuple[int, Any]]) -> None:
    for number, parallel in pairs:
        name, rows = CASES[number]
        found = _losses(DROPPING[name], parallel, rows)
        assert found == pytest.approx(serial[name, rows], rel=1e-10), (name, rows, parallel)


def test_dropout_differs_from_batch_to_batch() -> None:
    serial = _serial_dropping()
    assert len({loss for losses in serial.values() for loss in losses}) == 2 * len(serial)


@pytest.mark.few(1)
@pytest.mark.parametrize("rest", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "rest"])
@pytest.mark.parametrize(
    "world", [pytest.param(world, marks=pytest.mark.slow if world == 8 else ()) for world in DROPPING_SPECS]
)
def test_dropout_is_the_same_under_every_spec(world: int, rest: bool) -> None:
    """One of the cases for each spec; on other worlds than four ranks without gpt2, for which ranks import transformers."""
    cases, part = (4, 4) if world == 4 else (3, 3)
    pairs = [
        (case, parallel)
        for number, parallel in enumerate(DROPPING_SPECS[world])
        for case in range(cases)
        if ((number + case) % part != 0) == rest
    ]
    run_on_ranks(world, _compare_dropping, _serial_dropping(), pairs)


def _dropping() -> GPT:
    return GPT(GPTConfig(**SIZES, dropout=0.1))


def _dropping_gpt2() -> nn.Module:
    """Drops in the embedding, in the residual stream and in attention."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=4,
        embd_pdrop=0.1,
        resid_pdrop=0.1,
        attn_pdrop=0.1,
    )
    return GPT2LMHeadModel(config)


def test_torch_dropout_is_repeatable_where_a_model_cannot_be_sharded() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.dropout = nn.Parameter(torch.ones(8)), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return (self.dropout(x) * self.weight).sum()

    def losses() -> list[float]:
        engine = Engine(Odd(), optimizer=dict(name="sgd", lr=0.0), loss_fn=lambda output, batch: output)
        return [engine.train_step((torch.arange(8.0).view(1, 8), torch.zeros(1))) for _ in range(4)]

    assert losses() == losses()
    assert len(set(losses())) > 1


@ranks(2)
def test_the_scheduler_steps_with_the_optimizer() -> None:
    engine = Engine(
        gpt,
        dict(data=2),
        optimizer=dict(name="sgd", lr=1.0),
        gradient_accumulation=2,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
    )
    seen = []
    for batch in global_batches(4, 6):
        engine.train_step(engine.shard_batch(batch))
        assert engine.last is not None
        seen.append(engine.last.lr)
    assert seen == [1.0, 1.0, 1.0, 0.5, 0.5, 0.25]


@ranks(4)
def test_buckets_are_reduced_while_backward_runs_and_only_at_the_last_micro_step() -> None:
    from meshfold.engine.states import data_parallel
    from meshfold.mesh import record

    engine = Engine(gpt, dict(data=4), optimizer=ADAMW, gradient_accumulation=2)
    parameters = [p for p in engine.model.parameters() if p.requires_grad]
    engine.states.reducer.close()
    engine.states.reducer = data_parallel.GradientReducer(
        parameters, engine.states.masters, engine.mesh, bucket_bytes=20_000
    )
    buckets = engine.states.reducer.buckets
    assert len(buckets) > 3
    launched_during_backward: list[int] = []
    first = engine.model.get_parameter("blocks.0.norm1.weight")
    first.register_hook(lambda grad: launched_during_backward.append(engine.states.reducer._next))
    for batch in global_batches(4, 2):
        with record() as log:
            engine.train_step(engine.shard_batch(batch))
        large = [entry for entry in log.entries if entry.kind == "all_reduce" and entry.block_bytes > 64]
        assert len(large) == (len(buckets) if engine.last is not None and engine.last.stepped else 0)
        assert all(entry.axes == ("data",) for entry in large)
    assert launched_during_backward[0] == 0
    assert launched_during_backward[1] > 0
    values = sum(p.numel() for p in parameters)
    assert values * 4 <= sum(entry.block_bytes for entry in large) <= values * 4 * 1.05
    barrier(engine.mesh.group("data"))


def test_no_decay_spares_norms_and_biases() -> None:
    engine = Engine(gpt, optimizer=dict(name="adamw", lr=0.1, weight_decay=0.5, no_decay="norms_and_biases"))
    assert engine.optimizer is not None
    decays = {group["weight_decay"]: {p.dim() for p in group["params"]} for group in engine.optimizer.param_groups}
    assert decays == {0.5: {2}, 0.0: {1}}


WRONG: list[tuple[dict[str, Any], str]] = [
    (dict(precision="float16"), "it is called 'fp16' here"),
    (dict(precision="bfloat"), "it is called 'bf16' here"),
    (
        dict(optimizer=dict(name="adamw", learning_rate=1e-3)),
        "'learning_rate' is called 'lr' here: write lr=0.001",
    ),
    (
        dict(optimizer=dict(name="sgd", lr=0.1, wd=0.1)),
        "'wd' is called 'weight_decay' here: write weight_decay=0.1",
    ),
    (dict(precision=16), "precision=16"),
    (dict(precision=dict(name="fp16", initial_scal=2)), "'initial_scal'.*'initial_scale'"),
    (dict(precision=dict(name="bf16", initial_scale=2.0)), "no key 'initial_scale'"),
    (dict(precision=dict(name="fp16", backoff_factor=2.0)), "backoff_factor=2.0.*below 1"),
    (dict(precision=dict(name="fp16", initial_scale=0)), "initial_scale=0"),
    (dict(precision=dict(initial_scale=1.0)), "needs a name"),
    (dict(clip_grad_norm=0), "clip_grad_norm=0"),
    (dict(clip_grad_norm=True), "clip_grad_norm=True"),
    (dict(clip_grad_norm="1"), "clip_grad_norm='1'"),
    (dict(clip_grad_norm=math.inf), "clip_grad_norm=inf"),
    (dict(gradient_accumulation=0), "gradient_accumulation=0"),
    (dict(gradient_accumulation=2.0), "gradient_accumulation=2.0"),
    (dict(seed=-1), "seed=-1"),
    (dict(loss_fn=3), "loss_fn=3"),
    (dict(device="gpu"), "device='gpu'"),
    (dict(optimizer="adamx"), "no optimizer 'adamx'.*'adam"),
    (dict(optimizer=dict(lr=1e-3)), "needs a name"),
    (dict(optimizer=dict(name="adamw", lr=-1.0)), "learning rate"),
    (dict(optimizer=dict(name="adamw", fused=True)), "no key 'fused'"),
    (dict(optimizer=dict(name="adamw", no_decay="biases")), "norms_and_biases"),
    (dict(optimizer=torch.optim.LBFGS), "LBFGS needs all gradients as one vector"),
    (dict(optimizer=dict(name=torch.optim.Adafactor), parallel=dict(tensor=1)), "Adafactor"),
    (
        dict(optimizer=torch.optim.SGD([torch.zeros(1)], lr=1.0)),
        "holds parameters that the engine replaces.*name=torch.optim.SGD",
    ),
    (dict(optimizer=lambda parameters: 3), "made 3"),
    (dict(optimizer=3), "optimizer=3"),
    (dict(lr_scheduler=lambda optimizer: None), "without an optimizer"),
    (dict(optimizer="sgd", lr_scheduler=lambda optimizer: None), "made None"),
    (dict(parallel=None), "parallel=None"),
    (dict(parallel=dict(data=2)), "world size is 1"),
    (dict(parallel=dict(pipelin=1)), "'pipeline'"),
    (dict(parallel=dict(pipeline=1, sequence=dict(mode="ring", size=1), zero=dict(stage=4))), "no stage 4"),
    (dict(model=3), "model=3"),
    (dict(model=lambda: 3), "int"),
]


def test_every_wrong_setting_is_a_clear_error() -> None:
    for setting, message in WRONG:
        arguments = {"model": gpt, **setting}
        with pytest.raises(SpecError, match=message):
            Engine(**arguments)


def test_every_wrong_batch_is_a_clear_error() -> None:
    engine = Engine(gpt, optimizer="sgd")
    for batch, message in [
        (torch.zeros(2, 3), "input_ids of shape"),
        (torch.zeros(3, dtype=torch.int64), "input_ids of shape"),
        (torch.zeros(0, 3, dtype=torch.int64), "that is not empty"),
        (
            {
                "input_ids": torch.zeros(2, 3, dtype=torch.int64),
                "labels": torch.zeros(2, 4, dtype=torch.int64),
            },
            "give one label per token",
        ),
        ({}, "without a tensor"),
        ("text", "batch of type str"),
        ((torch.zeros(2, 3), torch.zeros(2)), "needs Engine"),
    ]:
        with pytest.raises(SpecError, match=message):
            engine.train_step(batch)
    with pytest.raises(TrainingError, match="no optimizer"):
        Engine(gpt).train_step(torch.zeros(2, 3, dtype=torch.int64))
    no_loss = Engine(nn.Sequential(nn.Linear(2, 2)), optimizer="sgd", loss_fn=lambda output, batch: output)
    with pytest.raises(SpecError, match="loss_fn returned 4×2 float32"):
        no_loss.train_step((torch.zeros(4, 2), torch.zeros(4)))


@ranks(2)
def test_a_second_gradient_after_its_bucket_was_sent_is_refused() -> None:
    from torch.utils.checkpoint import checkpoint

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = checkpoint(self.shared, x, use_reentrant=True)
            return x

    with Engine(Twice(), dict(data=2), optimizer="sgd", loss_fn=lambda output, batch: output.sum()) as engine:
        with pytest.raises(TrainingError, match="use_reentrant=False"):
            engine.train_step((torch.ones(1, 2, requires_grad=True), torch.ones(1)))
        barrier(engine.mesh.group("data"))
