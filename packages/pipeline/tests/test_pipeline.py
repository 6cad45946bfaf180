"""What a pipeline does beside its schedule: ties, what travels, dropout, evaluation, other axes, refusals; in float64."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from pipeline_checks import (
    SEQUENCE,
    VOCAB,
    WIDTH,
    Model,
    assert_gradients,
    compare,
    gradients,
    loss_of,
    model,
    tokens,
)
from torch import Tensor, nn

from meshfold.mesh import LayoutError, Mesh, MeshfoldError, SpecError, dropout_stream, metadata, record
from meshfold.mesh.testing import ranks, run_on_ranks
from meshfold.pipeline import Pipeline, schedule


@ranks(2)
def test_gradients_accumulate_and_are_scaled() -> None:
    serial = model(tie=True)
    pipeline = Pipeline(copy.deepcopy(serial), Mesh({"pipe": 2}), microbatches=2)
    for seed in range(3):
        (loss_of(serial, tokens(4, seed)) / 3).backward()
        pipeline.step(tokens(4, seed), scale=1 / 3)
    assert_gradients(pipeline, gradients(serial), "three micro-steps")


@ranks(4)
def test_a_smaller_last_batch_and_other_lengths() -> None:
    shapes = [(8, 6), (3, 6), (1, 6), (5, 4)]
    batches = [tokens(rows, 1, length) for rows, length in shapes]
    pipeline = compare(model, batches, {"pipe": 4}, "smaller", schedule="zb-h1", microbatches=4)
    assert [len(pipeline.split(batch)) for batch in batches] == [4, 3, 1, 4]
    by_itself = Pipeline(model(), Mesh({"pipe": 4}))
    assert [len(by_itself.split(tokens(rows))) for rows in (8, 12, 16, 6, 3)] == [4, 4, 4, 4, 3]
    # Where two rows have to stay together, and three.
    assert [len(by_itself.split(tokens(rows), unit=2)) for rows in (8, 6, 7, 2, 1)] == [4, 3, 4, 1, 1]
    assert [len(part.given["input_ids"]) for part in by_itself.split(tokens(14), unit=3)] == [6, 3, 3, 2]
    assert [len(part.given["input_ids"]) for part in pipeline.split(tokens(6), unit=2)] == [2, 2, 1, 1]


# -- tied parameters ------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_tied_embeddings(name: str) -> None:
    run_on_ranks(4, check_tied, name)


def check_tied(name: str) -> None:
    pipeline = compare(
        partial(model, 9, tie=True),
        [tokens(6, seed) for seed in range(4)],
        {"pipe": 4},
        name,
        schedule=name,
        microbatches=4,
    )
    rank = pipeline.mesh.index("pipe")
    kept = dict(pipeline.named_parameters())
    ends = {0} if name == "zb-v" else {0, 3}  # the rank of the last stage of zb-v is that of the first
    assert ("embed.weight" in kept) == (rank in ends)
    if name == "1f1b":
        copies: list[Any] = [None] * 4
        from torch import distributed

        # Over the group that is always there: what a new one is called goes by those that ranks have made before.
        mine = kept["embed.weight"].detach() if rank in ends else None
        distributed.all_gather_object(copies, mine)
        assert torch.equal(copies[0], copies[3])  # four steps of AdamW later, not a bit apart
    if name == "1f1b" and rank in ends:
        meta = metadata(kept["embed.weight"])
        assert meta is not None and meta.tie == "embed.weight"
    else:
        assert pipeline.partition.ties == ()


class Shared(nn.Module):
    """All blocks share one layer's weight, and one table is used again by each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(4))
        for layer in self.layers[1:]:
            layer[1].weight = self.layers[0][1].weight
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


def shared() -> Shared:
    torch.manual_seed(0)
    return Shared().double()


@ranks(4)
def test_a_weight_that_all_stages_share() -> None:
    pipeline = compare(shared, [tokens(4, s) for s in range(2)], {"pipe": 4}, "shared", microbatches=4)
    assert [tie.ranks for tie in pipeline.partition.ties] == [(0, 1, 2, 3)]


# -- what stages need beside the stream -----------------------------------------------------------------------------


class Skipping(nn.Module):
    """Every block reads the embeddings again, and a table that depends on the batch alone; frozen parameters; a bias of
    the model itself before the blocks, one behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.scale, self.shift = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(VOCAB))
        self.blocks = nn.ModuleList(Reader() for _ in range(5))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.embed.weight.requires_grad_(False)
        self.blocks[1].linear.bias.requires_grad_(False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        first = self.embed(input_ids) * self.scale
        x, parity = first, (input_ids % 2).unsqueeze(-1)
        for block in self.blocks:
            x, _ = block(x, again=first, table={"parity": parity})
        logits = self.head(x) + self.shift
        return {"loss": nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


class Reader(nn.Module):
    """Returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, again: Tensor, table: dict[str, Tensor]) -> tuple[Tensor, None]:
        return x + torch.tanh(self.linear(torch.cat([x, again], -1))) * table["parity"], None


def skipping() -> Skipping:
    torch.manual_seed(0)
    return Skipping().double()


@ranks(4)
def test_several_tensors_travel_and_the_batch_does_not() -> None:
    for name in ("1f1b", "zb-h1"):
        pipeline = compare(skipping, [tokens(6, s) for s in range(2)], {"pipe": 4}, name, schedule=name, microbatches=3)
        work = pipeline.split(tokens(6))[0]
        assert [len(slots) for slots in pipeline.plan_of(work).slots.values()] == [1, 2, 2, 2, 2]
        assert ("scale" in dict(pipeline.named_parameters())) == (pipeline.mesh.rank == 0)
        assert ("shift" in dict(pipeline.named_parameters())) == (pipeline.mesh.rank == 3)


def regression() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(nn.Linear(3, WIDTH), *blocks, nn.Linear(WIDTH, 2)).double()


@ranks(2)
def test_a_sequential_with_a_loss_function() -> None:
    serial = regression()
    example = ((torch.zeros(1, 3, dtype=torch.float64),), {})
    pipeline = Pipeline(
        copy.deepcopy(serial),
        Mesh({"pipe": 2}),
        microbatches=3,
        loss_fn=lambda output, batch: (output - batch[1]).square().mean(),
        example=example,
    )
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    wanted = (serial(x) - y).square().mean()
    wanted.backward()
    assert torch.allclose(pipeline.step((x, y)), wanted, rtol=1e-12)
    assert_gradients(pipeline, gradients(serial), "sequential")
    assert torch.allclose(pipeline(x), serial(x), rtol=1e-12)
    assert torch.allclose(pipeline.evaluate((x, y)), wanted, rtol=1e-12)


# -- dropout, evaluation, generation --------------------------------------------------------------------------------


@ranks(4)
def test_dropout_is_that_of_one_process() -> None:
    from meshfold.models import GPTConfig, build
    from meshfold.tensor_parallel import parallelize

    config = GPTConfig(vocab_size=64, hidden=16, layers=6, heads=2, max_positions=8, dropout=0.3)
    torch.manual_seed(0)
    serial = build(config).double()
    cut = copy.deepcopy(serial)
    parallelize(serial, Mesh({"tensor": 1}, rank=0), "1d")
    for mesh, name in ((Mesh({"pipe": 4, "tensor": 1}), "zb-h1"), (Mesh({"pipe": 2, "tensor": 2}), "1f1b")):
        mine = copy.deepcopy(cut)
        parallelize(mine, mesh, "1d")
        pipeline = Pipeline(mine, mesh, schedule=name, microbatches=4)
        batch = tokens(6)
        serial.zero_grad()
        with dropout_stream(3, 7, first_row=10, first_token=60):
            wanted = loss_of(serial, batch)
            wanted.backward()
            loss = pipeline.step(batch)
        assert abs(float(loss - wanted)) < 1e-9
        if mesh.size("tensor") == 1:
            assert_gradients(pipeline, gradients(serial), "dropout")
        with dropout_stream(3, 8, first_row=10, first_token=60):
            assert abs(float(pipeline.step(batch) - wanted)) > 1e-6  # another step drops other elements


@ranks(2)
def test_a_block_at_several_places_drops_what_it_drops_in_one_process() -> None:
    from meshfold.models import GPTConfig, build
    from meshfold.tensor_parallel import parallelize

    config = GPTConfig(vocab_size=64, hidden=16, layers=2, heads=2, max_positions=8, dropout=0.3)
    torch.manual_seed(0)
    serial = build(config).double()
    (blocks,) = (module for module in serial.modules() if isinstance(module, nn.ModuleList))
    one, two = blocks
    blocks.extend([one, two, two, one])
    cut = copy.deepcopy(serial)
    parallelize(serial, Mesh({"tensor": 1}, rank=0), "1d")
    batch = tokens(6)
    with dropout_stream(3, 7):
        wanted = loss_of(serial, batch)
        wanted.backward()
    for name in ("1f1b", "interleaved"):
        mine, mesh = copy.deepcopy(cut), Mesh({"pipe": 2, "tensor": 1})
        parallelize(mine, mesh, "1d")
        pipeline = Pipeline(mine, mesh, schedule=name, microbatches=2)
        with dropout_stream(3, 7):
            assert abs(float(pipeline.step(batch) - wanted)) < 1e-9
        assert_gradients(pipeline, gradients(serial), name)


def test_draws_of_other_stages_are_counted() -> None:
    with dropout_stream(3, 7) as whole:
        calls = [whole.draw("a") for _ in range(3)]
    with dropout_stream(3, 7) as stage, stage.after_calls_elsewhere(2):
        assert stage.draw("a") == calls[2]
        with pytest.raises(MeshfoldError, match=r"'a' is called more than once .* a dropout of its own"):
            stage.draw("a")


@ranks(4)
def test_evaluation_and_text() -> None:
    from meshfold.models import LlamaConfig, build, generate

    config = LlamaConfig(vocab_size=64, hidden=16, layers=8, heads=4, kv_heads=2, ffn=24, max_positions=16, dropout=0.2)
    torch.manual_seed(0)
    serial = build(config).double().eval()
    for name in ("1f1b", "interleaved", "zb-v"):
        pipeline = Pipeline(copy.deepcopy(serial), Mesh({"pipe": 4}), schedule=name)
        batch = tokens(5)
        with torch.no_grad():
            wanted = loss_of(serial, batch)
        assert abs(float(pipeline.train().evaluate(batch) - wanted)) < 1e-12
        assert pipeline.training and all(p.grad is None for p in pipeline.parameters())
        ids = batch["input_ids"]
        with torch.no_grad():
            assert torch.allclose(pipeline.eval()(ids).logits, serial(ids).logits, rtol=1e-12)
        assert torch.equal(
            generate(pipeline, ids[:3], 4, temperature=0.0), generate(serial, ids[:3], 4, temperature=0.0)
        )


# -- stages on the meta device --------------------------------------------------------------------------------------


@ranks(4)
def test_stages_that_are_never_whole_have_the_same_first_values() -> None:
    from meshfold.mesh import build_on_meta, materialize
    from meshfold.models import GPT, GPTConfig

    config = GPTConfig(vocab_size=64, hidden=16, layers=6, heads=2, max_positions=8, tie=True)
    whole, trace = build_on_meta(lambda: GPT(config))
    materialize(whole, trace, seed=5, device="cpu")
    pipeline = Pipeline(lambda: GPT(config), Mesh({"pipe": 4}), seed=5, microbatches=4)
    wanted = dict(whole.named_parameters())
    for name, parameter in pipeline.named_parameters():
        assert torch.equal(parameter, wanted[name]), name
    assert sum(p.numel() for p in pipeline.parameters()) < sum(p.numel() for p in whole.parameters()) / 2
    batch = tokens(4)
    assert abs(float(pipeline.step(batch) - loss_of(whole, batch))) < 1e-5


# -- communication --------------------------------------------------------------------------------------------------


@ranks(4)
def test_what_is_sent_is_what_the_program_says() -> None:
    pipeline = Pipeline(model(), Mesh({"pipe": 4}), microbatches=4)
    pipeline.step(tokens(4))  # channels are open then, shapes known
    with record() as log:
        pipeline.step(tokens(4))
    rank = pipeline.mesh.rank
    size = SEQUENCE * WIDTH * 8
    sends = [entry for entry in log.entries if entry.kind == "send"]
    assert [entry.block_bytes for entry in sends] == [size] * (4 * ((rank < 3) + (rank > 0)))
    assert [entry.kind for entry in log.entries if entry.kind != "send"] == ["broadcast"]  # the loss


@ranks(2)
def test_gradients_are_handed_on_when_they_are_whole() -> None:
    seen: list[tuple[str, Tensor]] = []
    pipeline = Pipeline(
        model(tie=True),
        Mesh({"pipe": 2}),
        schedule="interleaved",
        microbatches=4,
        reduce=lambda named: seen.extend((name, p.grad.clone()) for name, p in named),
    )
    pipeline.step(tokens(4))
    kept = dict(pipeline.named_parameters())
    assert sorted(name for name, _ in seen) == sorted(kept)
    assert all(torch.equal(gradient, kept[name].grad) for name, gradient in seen)
    assert seen[-1][0] == "embed.weight"  # it waits for the other rank


@ranks(2)
def test_a_step_that_fails_leaves_nothing_behind() -> None:
    pipeline = Pipeline(model(tie=True), Mesh({"pipe": 2}), microbatches=2)
    pipeline.step(tokens(4))
    before = {name: p.grad.clone() for name, p in pipeline.named_parameters()}
    bad = {**tokens(4), "labels": torch.full((4, SEQUENCE), VOCAB + 5)}
    if pipeline.mesh.rank == 1:
        works = pipeline.split(bad)
        stage = pipeline._stages[1]
        work = works[0]
        slot = pipeline.plan_of(work).slots[stage.first][0]
        with pytest.raises(IndexError):
            stage.forward(0, work, pipeline.plan_of(work), [torch.zeros(slot.shape, dtype=slot.dtype)])
        assert stage.live == () and pipeline.partition.partial_forward.run is None
    pipeline.step(tokens(4))
    for name, p in pipeline.named_parameters():
        assert torch.allclose(p.grad, 2 * before[name], rtol=1e-9, atol=1e-12), name


# -- refusals -------------------------------------------------------------------------------------------------------


class Functional(Model):
    """Uses the embedding's table behind the blocks without a module of its own."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        mask = torch.zeros(input_ids.shape[1], input_ids.shape[1], dtype=torch.bool)
        for layer in self.layers:
            x = layer(x, mask)
        logits = nn.functional.linear(x, self.embed.weight)
        return {"loss": logits.square().mean()}


class Growing(nn.Module):
    """A block that changes the shape."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.linear(x)] * 2, 1)


class Pyramid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Growing() for _ in range(4))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean()}


class Named(nn.Module):
    """A block that returns a tensor, or a tuple with it and with more."""

    def __init__(self, *, pair: bool = False, more: bool = False) -> None:
        super().__init__()
        self.linear, self.pair, self.more = nn.Linear(WIDTH, WIDTH), pair, more

    def forward(self, x: Tensor) -> Any:
        y = x + torch.tanh(self.linear(x))
        return (y, y[:, :1] if self.more else None) if self.pair else y


class Ends(nn.Module):
    """Blocks that hand each other a tensor, the last of which returns a tuple."""

    def __init__(self, *blocks: Named) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCAB, WIDTH), nn.Sequential(*blocks)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x, _ = self.blocks(self.embed(input_ids))
        return {"loss": x.square().mean()}


def ends(**last: bool) -> Ends:
    torch.manual_seed(0)
    return Ends(*(Named(**last if i == 3 else {}) for i in range(4))).double()


@ranks(4)
def test_what_stands_for_a_block_returns_in_the_form_of_that_block() -> None:
    for last in (dict(pair=True), dict(pair=True, more=True)):
        for name in ("1f1b", "zb-h2"):
            compare(
                partial(ends, **last),
                [tokens(4)],
                {"pipe": 4},
                f"{name} {last}",
                schedule=name,
                microbatches=2,
            )


class Hears(Ends):
    """Asks for what the first block returns beside the stream."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        first, *rest = self.blocks
        x, more = first(self.embed(input_ids))
        assert more.dim() == 3
        for block in rest:
            x = block(x)
        return {"loss": x.square().mean()}


@ranks(2)
def test_tensors_that_no_block_of_a_rank_returns_are_refused() -> None:
    said = r"block 0 returns \(1, 8, 16\) and \(1, 1, 16\), but block 1 \(1, 8, 16\): .* Let all blocks return the same form"
    with pytest.raises(LayoutError, match=said):
        Pipeline(Hears(Named(pair=True, more=True), Named()), Mesh({"pipe": 2}), microbatches=1)


class Residual(nn.Module):
    """What is made before the blocks is used behind them, by the model's own code."""

    def __init__(self, *, again: bool, picky: bool = False) -> None:
        super().__init__()
        self.again, self.picky = again, picky
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.Sequential(*(Reads(again) for _ in range(3)))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        first = x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, first) if self.again else block(x)
        if self.picky and not input_ids.any():
            raise ValueError("padding alone")
        logits = self.head(first + x)
        return {"logits": logits, "loss": logits.square().mean()}


class Detached(Residual):
    """No gradient tells that the end uses what was made before the blocks, and nothing but the loss is returned."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        x = self.embed(input_ids)
        first = x.detach()
        for block in self.blocks:
            x = block(x)
        return self.head(first + x).square().mean()


class Reads(nn.Module):
    def __init__(self, again: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, first: Tensor | None = None) -> Tensor:
        y: Tensor = self.linear(x)
        return y


@ranks(2)
def test_what_does_not_travel_is_refused_and_travels_as_an_argument() -> None:
    mesh = Mesh({"pipe": 2})
    with pytest.raises(LayoutError, match=r"between the blocks of blocks, at block 2 .* is missing there"):
        Pipeline(Residual(again=False), mesh, microbatches=1)
    # One whose end cannot be run on the example is found out when a stage first runs.
    pipeline = Pipeline(Residual(again=False, picky=True), mesh, microbatches=1)
    work = pipeline.split(tokens(2))[0]
    plan = pipeline.plan_of(work)
    if mesh.rank == 1:
        received = [torch.zeros(2, SEQUENCE, WIDTH)]
        with pytest.raises(LayoutError, match=r"returns only NaN for finite inputs.*between the blocks of blocks"):
            pipeline._stages[1].forward(0, work, plan, received)
    pipeline = Pipeline(Detached(again=False), mesh, microbatches=1)
    work = pipeline.split(tokens(2))[0]
    plan = pipeline.plan_of(work)
    if mesh.rank == 1:
        with pytest.raises(LayoutError, match=r"returns only NaN for finite inputs.*between the blocks of blocks"):
            pipeline._stages[1].forward(0, work, plan, [torch.zeros(2, SEQUENCE, WIDTH)])
    assert Pipeline(Residual(again=True), mesh, microbatches=2).step(tokens(4)).isfinite()


@ranks(2)
def test_refusals() -> None:
    mesh = Mesh({"pipe": 2})
    with pytest.raises(LayoutError, match="8 blocks cannot be cut into 40 stages"):
        Pipeline(model(), mesh, schedule="interleaved", chunks=20)
    with pytest.raises(LayoutError, match=r"no nn\.ModuleList"):
        Pipeline(nn.Linear(2, 2), mesh)
    with pytest.raises(LayoutError, match=r"called with a tensor \(1, 6\).*Give\s+example"):
        Pipeline(regression(), mesh, example=((torch.zeros(1, 6),), {}))
    with pytest.raises(LayoutError, match="layers="):
        Pipeline(model(), mesh, layers=[8, 1])
    pipeline = Pipeline(Functional().double(), mesh, microbatches=1)
    work, received = pipeline.split(tokens(2))[0], [torch.zeros(2, SEQUENCE, WIDTH, dtype=torch.float64)]
    plan = pipeline.plan_of(work)
    if mesh.rank == 1:
        with pytest.raises(LayoutError, match=r"'embed\.weight' belongs to a stage on another rank"):
            pipeline._stages[1].run(work, plan, received)
    with pytest.raises(LayoutError, match="keep the shape"):
        Pipeline(Pyramid(), mesh, microbatches=1).step(tokens(2))
    with pytest.raises(SpecError, match="microbatches=0"):
        Pipeline(model(), mesh, microbatches=0)
    with pytest.raises(SpecError, match="schedule of 2"):
        Pipeline(model(), mesh, microbatches=4, schedule=schedule("1f1b", ranks=2, microbatches=2))
    with pytest.raises(SpecError, match="cannot be cut into 4 micro-batches"):
        Pipeline(model(), mesh, schedule=schedule("1f1b", ranks=2, microbatches=4)).step(tokens(3))


# -- with other axes, compiled, measured ----------------------------------------------------------------------------


@ranks(4)
def test_tensor_parallel_stages() -> None:
    from meshfold.mesh.parameters.parameter_meta import metadata_on
    from meshfold.models import LlamaConfig, build
    from meshfold.tensor_parallel import parallelize

    config = LlamaConfig(vocab_size=64, hidden=32, layers=5, heads=4, kv_heads=1, ffn=48, max_positions=16, tie=True)
    torch.manual_seed(0)
    whole = build(config).double()
    serial = copy.deepcopy(whole)
    loss_of(serial, tokens(6)).backward()
    mesh = Mesh({"pipe": 2, "tensor": 2})
    for mode, name in (("1d", "zb-h1"), ("1d+sequence", "1f1b"), ("1d", "zb-v")):
        mine = copy.deepcopy(whole)
        parallelize(mine, mesh, mode)
        pipeline = Pipeline(mine, mesh, schedule=name, microbatches=3)
        loss = pipeline.step(tokens(6))
        assert abs(float(loss - loss_of(serial, tokens(6)))) < 1e-9
        parts = {
            key: metadata_on(p, mesh).placement.shard(serial.get_parameter(key).grad, mesh)
            for key, p in pipeline.named_parameters()
        }
        assert_gradients(pipeline, parts, f"{mode} under {name}")


@pytest.mark.slow  # the compiler's import and traces, on every rank
@ranks(2)
def test_blocks_may_be_compiled() -> None:
    serial = model(2)
    pipeline = Pipeline(copy.deepcopy(serial), Mesh({"pipe": 2}), schedule="zb-h1", microbatches=4)
    for block in pipeline.module.layers:
        block.compile(fullgraph=True, backend="aot_eager")
    wanted = loss_of(serial, tokens(8))
    wanted.backward()
    assert abs(float(pipeline.step(tokens(8)) - wanted)) < 1e-12
    assert_gradients(pipeline, gradients(serial), "compiled")


@ranks(2)
def test_measured_costs() -> None:
    pipeline = Pipeline(model(), Mesh({"pipe": 2}), microbatches=2, layers=[2, 6])
    pipeline.step(tokens(4))
    before = {name: p.grad.clone() for name, p in pipeline.named_parameters()}
    costs = pipeline.measure(tokens(4))
    for name, p in pipeline.named_parameters():
        assert torch.equal(p.grad, before[name]), name
    for times in (costs.forward, costs.backward_input, costs.backward_weight):
        assert isinstance(times, list) and len(times) == 2 and min(times) > 0
    again = Pipeline(model(), Mesh({"pipe": 2}), block_costs=[0, *[1.0] * 8, 2.0])
    assert again.partition.bounds == (0, 5, 8)


@ranks(4)
def test_dtypes_may_change_after_the_cut() -> None:
    serial = model()
    pipeline = Pipeline(lambda: Model(8), Mesh({"pipe": 4}), microbatches=2, dtype=torch.float64)
    values = dict(serial.named_parameters())
    with torch.no_grad():
        for name, parameter in pipeline.named_parameters():
            assert parameter.dtype == torch.float64
            parameter.copy_(values[name])
    wanted = loss_of(serial, tokens(4))
    wanted.backward()
    assert abs(float(pipeline.step(tokens(4)) - wanted)) < 1e-12
    assert_gradients(pipeline, gradients(serial), "float64")
    low = Pipeline(model(), Mesh({"pipe": 4}), microbatches=2)
    low.module.to(torch.bfloat16)
    assert abs(float(low.step(tokens(4)) - wanted)) < 0.1
    assert all(p.grad.dtype == torch.bfloat16 for p in low.parameters())


@ranks(4)
def test_tensor_parallel_stages_on_the_meta_device() -> None:
    from meshfold.mesh import build_on_meta, materialize
    from meshfold.mesh.initialization.parameter_values import shard_coordinates
    from meshfold.mesh.parameters.parameter_meta import metadata_on
    from meshfold.models import GPT, GPTConfig
    from meshfold.tensor_parallel import parallelize

    config = GPTConfig(vocab_size=64, hidden=16, layers=4, heads=2, max_positions=8, tie=True)
    whole, trace = build_on_meta(lambda: GPT(config))
    materialize(whole, trace, seed=5, device="cpu")
    mesh = Mesh({"pipe": 2, "tensor": 2})
    built, trace = build_on_meta(lambda: GPT(config))
    parallelize(built, mesh, "1d")
    pipeline = Pipeline(
        built,
        mesh,
        microbatches=2,
        device="cpu",
        fill=lambda left: materialize(
            left, trace, seed=5, device="cpu", placement_of=lambda name, tensor: shard_coordinates(tensor)
        ),
    )
    for name, parameter in pipeline.named_parameters():
        meta = metadata_on(parameter, mesh)
        assert torch.equal(parameter, meta.placement.shard(whole.get_parameter(name).detach(), mesh)), name
        assert meta.tie == ("embed.weight" if name == "embed.weight" else "")
    assert abs(float(pipeline.step(tokens(4)) - loss_of(whole, tokens(4)))) < 1e-5
