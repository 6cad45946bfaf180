"""Optimizers of torch, LAMB and LARS with their state on disk, in pieces: as in memory, whatever moves, fails or is refused."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank

from broken_disk import broken, raised
from stepping_cases import PLACEMENTS, SHAPES, Small, same, small, two_groups
from training_cases import batches, in_chunks, loss_of, make_model

from meshfold.mesh import Mesh
from meshfold.mesh.testing import run_on_ranks
from meshfold.optimizers import Lamb, Lars, Lion, NormOptimizer
from meshfold.optimizers.averages import averaged
from meshfold.zero_gemini import ChunkPlacement, Gemini
from meshfold.zero_gemini.errors import DiskError, MemoryPlanError
from meshfold.zero_gemini.memory.pinned import PAGE_BYTES
from meshfold.zero_gemini.nvme import DiskStore
from meshfold.zero_gemini.optimizer import DiskSettings, GeneralStepper
from meshfold.zero_gemini.optimizer.dispatch import optimizer_kind

HOST, DISK = ChunkPlacement(parameters="host", state="host"), ChunkPlacement(parameters="host", state="disk")
ELEMENTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "lion": (Lion, {}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    "plain sgd": (torch.optim.SGD, {}),
    "adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    "adamw": (torch.optim.AdamW, {"amsgrad": True}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "adamax": (torch.optim.Adamax, {}),
    "adadelta": (torch.optim.Adadelta, {}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "rprop": (torch.optim.Rprop, {}),
    "asgd": (torch.optim.ASGD, {}),
    "averages": (averaged(torch.optim.RMSprop), {"average": 0.9}),
}


def pieces_in(folder: Path | str, rank: int = 0, pages: int = 1) -> DiskSettings:
    """Pieces are so small that each chunk has several."""
    return DiskSettings(folder=folder, rank=rank, piece_bytes=pages * PAGE_BYTES)


def stepper(folder: Path | None, wide: bool = False) -> Callable[[torch.optim.Optimizer], GeneralStepper]:
    def make(made: torch.optim.Optimizer) -> GeneralStepper:
        with_state = bool(made.state)
        made.state.clear()
        dtype, disk = torch.float64 if wide else None, None if folder is None else pieces_in(folder, pages=3)
        return GeneralStepper(made, dtype, with_state=with_state, disk=disk)

    return make


@contextmanager
def both(folder: Path, name: str, placements: Iterable[ChunkPlacement], wide: bool = False) -> Iterator[list[Small]]:
    """The same on the device, and elsewhere."""
    cls, options = ELEMENTS[name]
    optimizer = partial(two_groups, cls=cls, **options)
    with (
        small(stepper(None, wide), torch.float32, PLACEMENTS[:1], optimizer=optimizer) as plain,
        small(stepper(folder, wide), torch.float32, placements, optimizer=optimizer) as made,
    ):
        yield [plain, made]


def step_both(both: Iterable[Small], *arguments: Any) -> None:
    for one in both:
        one.step(*arguments)


@pytest.mark.few(9)
@pytest.mark.parametrize("wide", [False, True], ids=["own masters", "float64 masters"])
@pytest.mark.parametrize("name", ELEMENTS)
def test_ten_steps_on_disk_are_those_in_memory(tmp_path: Path, name: str, wide: bool) -> None:
    """To the bit, also where parameters are unused in some steps, in pieces that parameters and chunks do not know of."""
    with both(tmp_path, name, PLACEMENTS[3:], wide) as (plain, made):
        for number in range(10):
            step_both((plain, made), [*SHAPES][number % 3 :] if number % 2 else SHAPES, torch.tensor(0.5))
        assert same(made.bits(), plain.bits())
        assert bool([*tmp_path.iterdir()]) == (name != "plain sgd" or wide), "without state there is nothing to store"
    assert not [*tmp_path.iterdir()]
    arena = made.memory.host_arena
    shards = [chunk.spec.shard_elems for chunk in made.chunks if chunk.tier == "host"]
    assert arena.used_bytes == sum(arena.nbytes(elements, torch.float32) for elements in shards)


@pytest.mark.parametrize("wide", [False, True], ids=["own masters", "float64 masters"])
@pytest.mark.parametrize("name", ["sgd", "adagrad", "adamw"])
def test_chunks_move_to_disk_and_back_with_the_same_bits(tmp_path: Path, name: str, wide: bool) -> None:
    with both(tmp_path, name, PLACEMENTS[:1], wide) as (plain, made):
        ids = made.parameter_ids()
        step_both((plain, made))
        for number, index in enumerate([3, 4, 1, 3, 0, 2, 4, 3, 0]):
            made.move(number % 3, PLACEMENTS[index])
            step_both((plain, made), [*SHAPES][number % 2 :])
            assert same(made.bits(), plain.bits()), index
        assert made.parameter_ids() == ids
        for index in range(3):
            made.move(index, PLACEMENTS[0])
        used = [one.memory.compute.used_bytes + one.memory.host_arena.used_bytes for one in (plain, made)]
        assert used[0] == used[1], "nothing is left of buffers and masters"


@pytest.mark.parametrize("wide", [False, True], ids=["own masters", "float64 masters"])
def test_a_saved_state_goes_on_from_disk(tmp_path: Path, wide: bool) -> None:
    """What is written by name is read again, also of a scalar; without it the state is new."""
    with both(tmp_path, "nadam", PLACEMENTS[3:], wide) as (plain, made):
        for _ in range(3):
            plain.step()
        made.count = plain.count
        made.step()
        made.stepper.reset()
        assert not any(found for chunk in made.chunks for found in made.stepper.entries(chunk).values())
        for chunk in plain.chunks:
            for name, entries in plain.stepper.entries(chunk).items():
                made.stepper.fill(name, plain.stepper.master(name).view(SHAPES[name]))
                for key in entries:
                    made.stepper.write(name, key, plain.stepper.read(name, key))
        made.count = plain.count
        for chunk in made.chunks:
            made.stepper.publish(chunk)
        assert same(made.bits(), plain.bits())
        step_both((plain, made))
        assert same(made.bits(), plain.bits())


# -- norms ----------------------------------------------------------------------------------------------------------

NORMS: dict[str, Any] = {
    "lamb": partial(Lamb, lr=0.02, eps=1e-4, weight_decay=0.1),
    "lars": partial(Lars, lr=0.5, trust_coeff=0.02, weight_decay=0.1, nesterov=True),
    "lars without momentum": partial(Lars, lr=0.5, trust_coeff=0.02, momentum=0.0),
}


def mixed(sizes: Any) -> list[ChunkPlacement]:
    return [(DISK, HOST, ChunkPlacement())[index % 3] for index in range(len(sizes))]


def everywhere(placement: ChunkPlacement) -> Callable[[Any], list[ChunkPlacement]]:
    return lambda sizes: [placement] * len(sizes)


def place(world: int) -> int:
    return Mesh({"data": world}).index("data")


def chunks_of(
    world: int, make: Any, folder: str | Path | None, placements: Any, **options: Any
) -> tuple[nn.Module, Gemini]:
    model = make_model()
    disk = None if folder is None else pieces_in(folder, place(world))
    options = {"dtype": torch.float32, **options}
    dtype = options.pop("dtype")
    return model, in_chunks(model, dtype, placements, world=world, disk=disk, make_optimizer=make, **options)


def train(model: nn.Module, gemini: Gemini, world: int, steps: range) -> None:
    for ids, extra in batches(steps.stop)[steps.start :]:
        gemini.begin(last=True)
        loss_of(model, ids, extra, rank=place(world), world=world).backward()
        gemini.clip(0.5)
        gemini.step()


def trained(world: int, make: Any, folder: str | None, placements: Any, **options: Any) -> list[Tensor]:
    model, gemini = chunks_of(world, make, folder, placements, **options)
    train(model, gemini, world, range(10))
    found = [gemini.read(p).clone() for p in model.parameters()]
    for name, entries in gemini.state_entries().items():
        found += [gemini.read_state(name, key, entry).clone() for key, entry in entries.items()]
    gemini.close()
    return found


def norms_everywhere(world: int, folder: str, names: dict[str, int], dtype: torch.dtype) -> None:
    """``names``: of the optimizers, with the stage of each."""
    for name, stage in names.items():
        wanted = trained(world, NORMS[name], None, everywhere(HOST), dtype=dtype, stage=stage)
        for placements in (everywhere(DISK), mixed):
            found = trained(world, NORMS[name], folder, placements, dtype=dtype, stage=stage)
            assert len(found) == len(wanted)
            for mine, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(mine, other, rtol=2e-4, atol=1e-5, msg=partial("{}: {}".format, name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_on_disk_and_beside_it_are_those_in_memory(tmp_path: Path, dtype: torch.dtype) -> None:
    """But for the order in which squares are added: sums over pieces are added in float64."""
    norms_everywhere(1, str(tmp_path), dict.fromkeys(NORMS, 3), dtype)


def test_norms_go_on_after_a_move_to_disk_and_back(tmp_path: Path) -> None:
    found = []
    for places in ([HOST] * 3, [HOST, DISK, HOST]):
        model, gemini = chunks_of(1, NORMS["lamb"], tmp_path, everywhere(places[0]), dtype=torch.bfloat16)
        for number, placement in enumerate(places):
            gemini.move(dict.fromkeys(gemini.chunks, placement))
            train(model, gemini, 1, range(2 * number, 2 * number + 2))
            assert bool([*tmp_path.iterdir()]) == (DISK in places[: number + 1])
        found.append([gemini.read(p).clone() for p in model.parameters()])
        gemini.close()
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-4, atol=1e-5)


def test_norms_on_disk_over_ranks(tmp_path: Path) -> None:
    run_on_ranks(2, norms_everywhere, 2, str(tmp_path), {"lamb": 3, "lars": 2}, torch.float32)


def test_state_is_read_once_for_elements_and_twice_for_norms(tmp_path: Path) -> None:
    """And written once."""
    moved: list[str] = []

    def counted(real: Any, call: str) -> Any:
        def do(store: DiskStore, name: str, tensor: Tensor) -> Any:
            moved.append(call)
            return real(store, name, tensor)

        return do

    for make, passes in ((Lion, 1), (NORMS["lamb"], 2)):
        model, gemini = chunks_of(1, make, tmp_path, everywhere(DISK), dtype=torch.bfloat16)
        train(model, gemini, 1, range(2))
        held = gemini._stepper.disk.held  # type: ignore[union-attr]
        pieces = sum(len(one.pieces) for one in held.values())
        assert pieces > 6
        moved.clear()
        with mock.patch.multiple(
            DiskStore, read=counted(DiskStore.read, "read"), write=counted(DiskStore.write, "write")
        ):
            ids, _ = batches(1)[0]
            train_all(model, gemini, ids)
        assert moved.count("write") == pieces
        # Two passes go there and back, and find up to three pieces in the buffers when they turn: which buffer is used again
        # depends on the writes that have ended.
        reads = moved.count("read")
        assert reads == pieces if passes == 1 else 2 * (pieces - 3) <= reads < 2 * pieces
        gemini.close()


def train_all(model: nn.Module, gemini: Gemini, ids: Tensor) -> None:
    gemini.begin(last=True)
    loss_of(model, ids, True).backward()
    gemini.finish()
    gemini.step()


# -- faults and refusals --------------------------------------------------------------------------------------------


def disk_breaks(world: int, bad: int, folder: str) -> None:
    for make in (partial(torch.optim.SGD, lr=0.1, momentum=0.9), NORMS["lamb"]):
        for call, after in (("preadv", 4), ("pwritev", 0), ("pwritev", 5)):
            model, gemini = chunks_of(world, make, folder, everywhere(DISK), dtype=torch.bfloat16)
            train(model, gemini, world, range(2))
            with broken(call, after if place(world) == bad else 10**9):
                error = raised(lambda: train(model, gemini, world, range(2, 5)))  # noqa: B023
            doing = "written to" if call == "pwritev" else "read from"
            assert isinstance(error, DiskError) and error.errno == errno.EIO, error
            words = str(error)
            assert f"could not be {doing} disk" in words and "resume from the last checkpoint" in words, words
            assert words.startswith(f"rank {bad}: the optimizer state of chunk of ") or world == 1, words
            for again in (
                gemini.flush,
                lambda: gemini.read(next(model.parameters())),  # noqa: B023
                lambda: gemini.move(dict.fromkeys(gemini.chunks, HOST)),  # noqa: B023
            ):
                assert isinstance(raised(again), DiskError)
            gemini.close()


def test_a_disk_that_breaks_stops_the_step_that_needs_it(tmp_path: Path) -> None:
    disk_breaks(1, 0, str(tmp_path))
    assert not [*tmp_path.iterdir()]


def test_a_disk_that_breaks_on_one_rank_of_two_stops_both(tmp_path: Path) -> None:
    run_on_ranks(2, disk_breaks, 2, 1, str(tmp_path))


def test_a_move_to_a_disk_that_breaks_changes_nothing(tmp_path: Path) -> None:
    with both(tmp_path, "sgd", PLACEMENTS[1:2], wide=True) as (plain, made):
        step_both((plain, made))
        used = made.memory.host_arena.used_bytes
        with broken("pwritev", 1), pytest.raises(DiskError, match="the cable is out"):
            made.stepper.move(made.chunks[0], PLACEMENTS[3])
        assert made.memory.host_arena.used_bytes == used
        step_both((plain, made))
        made.move(0, PLACEMENTS[3])
        step_both((plain, made))
        assert same(made.bits(), plain.bits())


class Counting(torch.optim.SGD):
    """Counts its steps by itself."""

    elementwise = True
    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return super().step(closure)


class InGroups(torch.optim.SGD):
    """Its rate falls with a count in its groups."""

    elementwise = True

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] = 0.1 / group["count"]
        return super().step(closure)


class Listed(torch.optim.SGD):
    elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["list"] = [parameter.clone()]


class Forgetful(NormOptimizer):
    """Asks for norms twice."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def _step(self) -> None:
        for group in self.param_groups:
            chosen = self._trained(group)
            for _ in range(2):
                self._norms(chosen, [p.detach() for p in chosen])


def test_what_an_optimizer_keeps_in_its_groups_is_counted_once_a_step(tmp_path: Path) -> None:
    """And its hooks are called once."""
    make = partial(InGroups, lr=0.1, momentum=0.9)
    wanted = trained(1, make, None, everywhere(HOST))
    assert same(trained(1, make, str(tmp_path), mixed), wanted)
    model, gemini = chunks_of(1, Lion, tmp_path, everywhere(DISK))
    called: list[Any] = []
    assert gemini.optimizer is not None
    gemini.optimizer.register_step_post_hook(lambda optimizer, *_: called.append(optimizer))
    train(model, gemini, 1, range(2))
    assert gemini._stepper.disk.held  # type: ignore[union-attr]
    gemini.close()
    assert len(called) == 2


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (
            Counting,
            r"state of Counting cannot be on disk: its step changes its own calls, and .*leave offload_path out",
        ),
        (Listed, r"state of Listed cannot be on disk: it keeps list, neither a number nor a tensor"),
    ],
)
def test_what_cannot_step_in_pieces_is_refused(tmp_path: Path, cls: Any, words: str) -> None:
    assert optimizer_kind(cls([nn.Parameter(torch.ones(2))], lr=0.1)) == "elementwise"
    with pytest.raises(MemoryPlanError, match=words):
        chunks_of(1, partial(cls, lr=0.1, momentum=0.9), tmp_path, everywhere(DISK))
    assert not [*tmp_path.iterdir()]
    model, gemini = chunks_of(1, partial(cls, lr=0.1, momentum=0.9), tmp_path, everywhere(HOST))
    with pytest.raises(MemoryPlanError, match=words):
        gemini.move(dict.fromkeys(gemini.chunks, DISK))
    train(model, gemini, 1, range(1))
    gemini.close()


def test_other_refusals_say_what_to_change(tmp_path: Path) -> None:
    with pytest.raises(MemoryPlanError, match=r"planned for disk, but no folder is given: set offload_path"):
        chunks_of(1, Lion, None, everywhere(DISK))
    model, gemini = chunks_of(1, Forgetful, tmp_path, everywhere(DISK), dtype=torch.bfloat16)
    with pytest.raises(MemoryPlanError, match=r"Forgetful cannot be on disk: it must ask for all sums .* once a step"):
        train(model, gemini, 1, range(1))
    gemini.close()
    model, gemini = chunks_of(1, partial(torch.optim.SGD, lr=0.1), tmp_path, everywhere(DISK), dtype=torch.bfloat16)
    train(model, gemini, 1, range(1))
    assert gemini.optimizer is not None
    gemini.optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(MemoryPlanError, match="SGD now keeps momentum_buffer, for which nothing is reserved on disk"):
        train(model, gemini, 1, range(1, 2))
    gemini.close()


def test_bytes_on_disk_are_those_of_the_state(tmp_path: Path) -> None:
    """A number for Lion, two for LAMB, and the masters of a model in bfloat16."""
    for make, numbers in ((Lion, 1), (NORMS["lamb"], 2), (NORMS["lars"], 1)):
        for dtype in (torch.float32, torch.bfloat16):
            _, gemini = chunks_of(1, make, tmp_path, everywhere(DISK), dtype=dtype)
            elements = sum(chunk.spec.shard_elems for chunk in gemini._gradients)
            wanted = 4 * (numbers + (dtype == torch.bfloat16))
            (file,) = tmp_path.iterdir()
            pieces = sum(len(one.pieces) for one in gemini._stepper.disk.held.values())  # type: ignore[union-attr]
            assert wanted * elements <= file.stat().st_size <= wanted * elements + PAGE_BYTES * (pieces + 2)
            assert gemini.bytes_of(gemini.chunks[0])[1] == wanted * gemini.chunks[0].shard.numel()
            gemini.close()
