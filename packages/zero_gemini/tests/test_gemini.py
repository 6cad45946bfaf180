"""Training in chunks is training: losses, gradients' norm, weights and optimizer state of one process's model."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshfold.mesh import Mesh, ParameterMeta, Placement, annotate
from meshfold.mesh.testing import ranks, run_on_ranks
from meshfold.zero_gemini import ChunkError, Gemini, Memory, Shares
from meshfold.zero_gemini.chunks.placement import EVERYTHING_ON_THE_DEVICE
from meshfold.zero_gemini.memory.arena import ROUND_BYTES
from meshfold.zero_gemini.runtime.units import find_units

WORDS, WIDTH, ROWS = 50, 24, 8
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
        self.gate = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)))) * self.gate


class Model(nn.Module):
    """Tied table and head, a frozen block, a part that only some batches use, one that none does, recomputed blocks."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.blocks[1].requires_grad_(False)
        self.sometimes, self.never = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.recompute = recompute

    def forward(self, ids: Tensor, extra: bool) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        if extra:
            x = x + self.sometimes(x)
        return self.head(self.norm(x))


class InPlace(Model):
    """Adds to what a unit returned, in place: of a linear layer over ``b s h`` this is a view, which gets another history."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__(recompute)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, ids: Tensor, extra: bool) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            y = block(x)
            y += x
            x = y
        if extra:
            x = x + self.sometimes(x)
        return self.head(self.norm(x))


class ChangedLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        y[:, 0] = y[:, 0] * 0.5
        return y


class InPlaceInside(InPlace):
    """A unit writes into a view of what it returns: the history of its output is made when it is asked for."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__(recompute)
        self.blocks = nn.ModuleList(ChangedLinear(WIDTH, WIDTH) for _ in range(4))


class Listed(nn.ModuleList):
    """A list with a parameter of its own, which the module around it reads."""

    def __init__(self) -> None:
        super().__init__(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(WIDTH))


class Scaled(nn.Sequential):
    """A sequence with a parameter and a forward of its own."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Holders(Model):
    """Parameters of modules that are never called, of lists, and of a parametrization, which is a list with a forward."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__(recompute)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scales = nn.ParameterList(torch.ones(WIDTH) for _ in range(2))
        self.shifts = nn.ModuleDict({"first": nn.ParameterDict({"x": nn.Parameter(torch.zeros(WIDTH))})})
        self.listed, self.scaled = Listed(), Scaled()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, ids: Tensor, extra: bool) -> Tensor:
        x = self.embed(ids) * self.scales[0] + self.shifts["first"]["x"]
        for block in (*self.blocks, *self.listed):
            x = block(x)
        x = self.normed(self.scaled(x * self.listed.scale)) * self.scales[1]
        if extra:
            x = x + self.sometimes(x)
        return self.head(self.norm(x))


def batches(count: int) -> list[tuple[Tensor, bool]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randint(WORDS, (ROWS, 6), generator=generator), step % 3 == 1) for step in range(count)]


def loss_of(model: nn.Module, ids: Tensor, extra: bool) -> Tensor:
    return F.cross_entropy(model(ids, extra)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def make_model(recompute: bool, kind: type[Model] = Model) -> Model:
    torch.manual_seed(0)
    return kind(recompute).double()


def compare(
    stage: int,
    chunk_elems: int,
    name: str,
    accumulate: int,
    recompute: bool,
    clip: float,
    kind: type[Model] = Model,
) -> None:
    make = {
        "adamw": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
        "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    }[name]
    serial, model = make_model(False, kind), make_model(recompute, kind)
    reference = make([p for p in serial.parameters() if p.requires_grad])
    world = int(torch.distributed.get_world_size())
    mesh = Mesh({"data": world})
    for p in model.parameters():
        shape = tuple(p.shape)
        place = Placement(shape=shape, axes=((),) * len(shape))
        annotate(p, ParameterMeta(mesh=mesh, placement=place, sum_axes=("data",)))
    gemini = Gemini(
        model,
        mesh,
        stage=stage,
        memory=Memory(CPU),
        make_optimizer=make,
        chunk_elems=chunk_elems,
    )
    rank, rows = mesh.index("data"), ROWS // world
    for step, (ids, extra) in enumerate(batches(5 * accumulate)):
        last = step % accumulate == accumulate - 1
        mine = ids[rank * rows : (rank + 1) * rows]
        gemini.begin(last=last)
        (loss_of(model, mine, extra) / world / accumulate).backward()
        (loss_of(serial, ids, extra) / accumulate).backward()
        if not last:
            continue
        gemini.finish()
        norm = gemini.clip(clip)
        wanted = nn.utils.clip_grad_norm_([p for p in serial.parameters() if p.grad is not None], clip)
        torch.testing.assert_close(norm, wanted, rtol=1e-10, atol=0.0)
        gemini.step()
        reference.step()
        reference.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(loss_of(model, ids, True), loss_of(serial, ids, True), rtol=1e-10, atol=0.0)
    names = dict(model.named_parameters())
    for key, p in serial.named_parameters():
        torch.testing.assert_close(gemini.read(names[key]), p.detach(), rtol=1e-9, atol=1e-12, msg=key)
    entries = gemini.state_entries()
    assert set(entries) == {key for key, p in serial.named_parameters() if reference.state.get(p)}
    for key, found in entries.items():
        for part, entry in found.items():
            wanted_state = reference.state[serial.get_parameter(key)][part]
            torch.testing.assert_close(
                gemini.read_state(key, part, entry).double(), wanted_state.double(), rtol=1e-9, atol=1e-12
            )
    gemini.close()


@pytest.mark.few(2)
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_is_that_of_one_process(stage: int, world: int) -> None:
    run_on_ranks(world, compare, stage, 2000, "adamw", 1, False, 0.5)


@pytest.mark.few(1)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accumulation_and_recomputation(stage: int) -> None:
    run_on_ranks(2, compare, stage, 1000, "adamw", 3, True, 0.5)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", [InPlace, InPlaceInside, Holders])
def test_other_models(kind: type[Model]) -> None:
    run_on_ranks(2, compare, 3, 600, "adamw", 1, False, 0.5, kind)


def test_every_parameter_is_in_a_unit() -> None:
    for kind in (Model, InPlace, Holders):
        model = kind()
        found = {p for unit in find_units(model) for p in unit.parameters}
        assert found == set(model.parameters())


def test_a_block_with_a_list_of_single_layers_is_one_unit() -> None:
    class Called(nn.Module):
        def __init__(self, parts: nn.Module) -> None:
            super().__init__()
            self.norm, self.parts = nn.LayerNorm(4), parts

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    def layers() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))

    blocks = nn.ModuleList([Called(layers()), Called(layers())])
    assert [unit.name for unit in find_units(Called(blocks))] == ["norm", "parts.0", "parts.1"]
    stages = nn.ModuleList([Called(blocks), Called(nn.ModuleList([Called(layers())]))])
    names = [unit.name for unit in find_units(Called(stages))]
    assert names == ["norm", "parts.0.norm", "parts.0.parts.0", "parts.0.parts.1", "parts.1.norm", "parts.1.parts.0"]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_any_elementwise_optimizer(name: str) -> None:
    run_on_ranks(2, compare, 3, 100_000, name, 2, False, 1e9)


# -- our Adam, regimes and placements -------------------------------------------------------------------------------


def in_chunks(
    world: int,
    dtype: torch.dtype,
    placements: Shares = EVERYTHING_ON_THE_DEVICE,
    regime: str = "A",
    stage: int = 3,
    chunk_elems: int = 1000,
) -> tuple[Model, Gemini]:
    model = make_model(False).float()
    mesh = Mesh({"data": world})
    for p in model.parameters():
        shape = tuple(p.shape)
        place = Placement(shape=shape, axes=((),) * len(shape))
        annotate(p, ParameterMeta(mesh=mesh, placement=place, sum_axes=("data",)))
    gemini = Gemini(
        model,
        mesh,
        stage=stage,
        memory=Memory(CPU),
        placements=placements,
        dtype=dtype,
        master_dtype=torch.float32,
        regime=regime,
        seed=3,
        make_optimizer=partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
        chunk_elems=chunk_elems,
    )
    return model, gemini


def train(model: Model, gemini: Gemini, steps: int = 6) -> list[Tensor]:
    """Losses, norms, and in the end every true weight."""
    seen = []
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    for ids, extra in batches(steps):
        gemini.begin(last=True)
        loss = loss_of(model, ids[rank * ROWS // world : (rank + 1) * ROWS // world], extra) / world
        loss.backward()
        gemini.finish()
        seen += [loss.detach().float(), gemini.clip(0.5)]
        gemini.step()
    return seen + [gemini.read(p) for p in model.parameters()]


def bits_of_placements(world: int, dtype: torch.dtype) -> None:
    """Device and host are two arenas of the CPU's memory, and everything really moves between them."""
    train(*in_chunks(world, dtype), steps=1)  # torch's first sums of a process have other bits
    wanted = train(*in_chunks(world, dtype))
    for stage, parameters, optimizer in (
        (3, 1.0, 1.0),
        (3, 0.5, 0.7),
        (3, 0.0, 1.0),
        (2, 0.0, 0.5),
        (1, 0.0, 0.0),
    ):
        placements = Shares(host_parameters=parameters, host_optimizer=optimizer)
        found = train(*in_chunks(world, dtype, placements, stage=stage))
        for a, b in zip(wanted, found, strict=True):
            assert torch.equal(a, b), (stage, parameters, optimizer)


@pytest.mark.few(1)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_stage_and_placement_trains_to_the_same_bits(dtype: torch.dtype, world: int) -> None:
    run_on_ranks(world, bits_of_placements, world, dtype)


def adam_is_torchs() -> None:
    """Float32 within 1e-6 of torch over 20 steps; the parts that are unused or used now and then included."""
    torch.manual_seed(0)
    serial = make_model(False).float()
    reference = torch.optim.AdamW([p for p in serial.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    for ids, extra in batches(20):
        loss_of(serial, ids, extra).backward()
        nn.utils.clip_grad_norm_([p for p in serial.parameters() if p.grad is not None], 0.5)
        reference.step()
        reference.zero_grad()
    model, gemini = in_chunks(1, torch.float32)
    found = train(model, gemini, steps=20)[-len(list(serial.parameters())) :]
    for (name, p), mine in zip(serial.named_parameters(), found, strict=True):
        torch.testing.assert_close(mine, p.detach(), rtol=1e-5, atol=1e-6, msg=name)
    steps = {
        name: int(gemini.read_state(name, "step", entry["step"])) for name, entry in gemini.state_entries().items()
    }
    assert steps["sometimes.weight"] == 7 and steps["norm.weight"] == 20
    assert not any(name.startswith(("never", "blocks.1")) for name in steps)


def test_adam_is_torchs() -> None:
    run_on_ranks(1, adam_is_torchs)


def regimes_learn(world: int) -> None:
    """On one batch, over and over: B and C lose little of what A learns."""
    lost, first = {}, 0.0
    for regime in ("A", "B", "C"):
        model, gemini = in_chunks(world, torch.bfloat16, regime=regime, chunk_elems=5000)
        ids, _ = batches(1)[0]
        rank = torch.distributed.get_rank()
        for _ in range(60):
            gemini.begin(last=True)
            loss = loss_of(model, ids[rank * ROWS // world : (rank + 1) * ROWS // world], False) / world
            loss.backward()
            gemini.finish()
            gemini.step()
            first = first or float(loss) * world
        lost[regime] = float(loss) * world
    assert lost["A"] < 0.1 * first, lost
    assert lost["B"] < 1.3 * lost["A"] and lost["C"] < 1.6 * lost["A"], lost


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_regimes_learn(world: int) -> None:
    run_on_ranks(world, regimes_learn, world)


def gradients_after_the_last_reduction() -> None:
    model, gemini = in_chunks(1, torch.float32)
    (ids, _), (more, _) = batches(2)
    for last, rows in ((True, ids), (False, more)):
        gemini.begin(last=last)
        loss_of(model, rows, False).backward()
    with pytest.raises(ChunkError, match="some of them are not summed over the ranks yet"):
        gemini.finish()
    gemini.reduce_rest()
    gemini.finish()
    assert gemini.norm() > 0
    gemini.step()


def test_gradients_after_the_last_reduction_are_an_error() -> None:
    run_on_ranks(1, gradients_after_the_last_reduction)


@ranks(2)
def test_gradients_that_wait_on_the_host_are_summed_few_at_a_time() -> None:
    """Those of whole chunks, as a pipeline's micro-batches leave them: all at once would need the device for the whole model."""
    model, gemini = in_chunks(2, torch.float32, Shares(host_parameters=1.0, host_optimizer=1.0))
    rank, arena = torch.distributed.get_rank(), gemini.memory.compute
    (ids, _), (more, _) = batches(2)
    for rows in (ids, more):
        gemini.begin(last=False)
        gemini.expect("apart")
        (loss_of(model, rows[rank * ROWS // 2 : (rank + 1) * ROWS // 2], False) / 2).backward()
    assert len(gemini.chunks) > 5 and arena.used_bytes == 0
    arena.reset_peak()
    gemini.reduce_rest()
    gemini.finish()
    largest = 4 * max(chunk.spec.size_elems for chunk in gemini.chunks)
    assert 0 < arena.peak_bytes <= 3 * (largest + ROUND_BYTES)
    serial = make_model(False).float()
    for rows in (ids, more):
        loss_of(serial, rows, False).backward()
    wanted = nn.utils.clip_grad_norm_([p for p in serial.parameters() if p.grad is not None], 1.0)
    torch.testing.assert_close(gemini.norm(), wanted.double(), rtol=1e-5, atol=0.0)
    gemini.close()
