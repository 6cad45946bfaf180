"""What can go wrong when optimizer state is on disk: each is a clear error in the step that needs it, and nothing starts
that cannot go on."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshfold.mesh import Mesh
from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.chunks.layout import Item, lay_out
from meshfold.zero_gemini.chunks.placement import ChunkPlacement
from meshfold.zero_gemini.errors import DiskError, MemoryPlanError, OutOfBudget
from meshfold.zero_gemini.memory.arena import Memory
from meshfold.zero_gemini.nvme import DiskStore
from meshfold.zero_gemini.optimizer import AdamStepper, DiskSettings
from meshfold.zero_gemini.optimizer import kernel_runs as runs_module
from meshfold.zero_gemini.optimizer.adam_state import Held
from meshfold.zero_gemini.optimizer.disk_state import DiskPlanes
from meshfold.zero_gemini.optimizer.master_weights import planes_of

PAGE = 4096
CPU = torch.device("cpu")
DEVICE, HOST, DISK = ChunkPlacement(), ChunkPlacement(state="host"), ChunkPlacement(state="disk")
CHUNKS, ELEMS = 4, 6144
PIECE = 5 * PAGE  # 2048 elements with 10 bytes of state each: three pieces a chunk


class Model:
    """Chunks of one parameter each."""

    def __init__(
        self, folder: Path | None, placement: ChunkPlacement = DISK, count: int = CHUNKS, **options: Any
    ) -> None:
        self.memory = Memory(CPU, host_bytes=options.pop("host_bytes", None))
        names = [f"p{i}" for i in range(count)]
        layout = lay_out([Item(name, ELEMS, 0) for name in names], ELEMS, 1)
        made = torch.optim.AdamW([nn.Parameter(torch.empty(0))], lr=1e-2)
        disk = None
        if folder is not None:
            disk = DiskSettings(folder=folder, rank=3, **{"piece_bytes": PIECE, **options})
        self.stepper = AdamStepper(made, "A", 0, disk)
        if placement == DISK:
            self.stepper.reserve([(torch.bfloat16, spec.shard_elems) for spec in layout.chunks])
        self.chunks = []
        for spec in layout.chunks:
            chunk = Chunk(
                spec,
                layout.shard_slices(spec, 0),
                [nn.Parameter(torch.empty(0))],
                [torch.Size([ELEMS])],
                Mesh({}).group(),
                dtype=torch.bfloat16,
                memory=self.memory,
                tier="device",
                whole_group=False,
            )
            self.chunks.append(chunk)
            self.stepper.adopt(chunk, placement.state)
            self.stepper.fill(spec.names[0], torch.linspace(-1, 1, ELEMS))
            self.stepper.publish(chunk)
            chunk.wait_if_resident()
        made.param_groups[0]["params"] = [self.stepper.optimizer_parameter(name) for name in names]
        self.count = 0

    def step(self) -> None:
        self.count += 1
        gradients = {chunk: torch.full((ELEMS,), 0.1 * self.count - place) for place, chunk in enumerate(self.chunks)}
        self.stepper.step(gradients, 1.0, {f"p{i}" for i in range(len(self.chunks))})
        for chunk in self.chunks:
            if not chunk.step_is_pending:
                self.stepper.publish(chunk)
                chunk.wait_if_resident()

    def forward(self) -> None:
        for chunk in self.chunks:
            chunk.wait_step()
            chunk.wait()

    def bits(self) -> list[Tensor]:
        self.stepper.finish()
        keys = ("exp_avg", "exp_avg_sq", "step")
        names = [f"p{i}" for i in range(len(self.chunks))]
        return [self.stepper.master(name) for name in names] + [
            self.stepper.read(name, key) for name in names for key in keys
        ]


@contextmanager
def model(*arguments: Any, **options: Any) -> Iterator[Model]:
    made = Model(*arguments, **options)
    try:
        yield made
    finally:
        made.stepper.close()


def equal(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def plain_bits(steps: int, count: int = CHUNKS) -> list[Tensor]:
    with model(None, DEVICE, count) as made:
        for _ in range(steps):
            made.step()
        return made.bits()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- before training ------------------------------------------------------------------------------------------------


def test_room_is_one_file_of_this_rank_and_goes_in_the_end(tmp_path: Path) -> None:
    with model(tmp_path) as made:
        assert files(tmp_path) == ["meshfold-optimizer-rank00003.blocks"]
        disk = made.stepper.disk
        assert disk is not None and disk.file_bytes == (tmp_path / files(tmp_path)[0]).stat().st_size
        assert CHUNKS * 3 * PIECE < disk.file_bytes <= CHUNKS * 3 * PIECE + 8 * PAGE
    assert not files(tmp_path)


def test_no_folder_was_named() -> None:
    with pytest.raises(MemoryPlanError, match=r"4 chunks is planned for disk, but no folder .*: set offload_path"):
        Model(None)
    with model(None, HOST) as made:
        with pytest.raises(MemoryPlanError, match=r"p1 to p1.* no folder is given: set offload_path"):
            made.stepper.move(made.chunks[1], DISK)
        made.step()
        assert equal(made.bits(), plain_bits(1))


def test_folders_and_files_that_cannot_be_used_are_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="does not exist"):
        Model(tmp_path / "missing")
    with pytest.raises(DiskError, match="cannot be opened"):
        Model(Path("/proc"))
    path = tmp_path / "meshfold-optimizer-rank00003.blocks"
    path.write_bytes(b"the only copy of a thesis")
    with pytest.raises(DiskError, match="is not overwritten"):
        Model(tmp_path)
    assert path.read_bytes() == b"the only copy of a thesis"


@contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def full(descriptor: int, start: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        yield


def test_a_full_disk_is_told_before_anything_starts_or_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with full_disk(monkeypatch), pytest.raises(DiskError, match="bytes are wanted"):
        Model(tmp_path)
    assert not files(tmp_path)
    with model(tmp_path, HOST) as made:
        made.step()
        used = None
        for index, placement in ((0, DISK), (1, DEVICE), (2, DISK)):
            made.stepper.finish()
            used = made.memory.host_arena.used_bytes
            if placement == DISK:
                with full_disk(monkeypatch), pytest.raises(DiskError, match="bytes are wanted"):
                    made.stepper.move(made.chunks[index], placement)
                assert made.memory.host_arena.used_bytes == used
            made.stepper.move(made.chunks[index], placement)
        made.step()
        assert equal(made.bits(), plain_bits(2))
        assert files(tmp_path) == [
            "meshfold-optimizer-1-rank00003.blocks",
            "meshfold-optimizer-rank00003.blocks",
        ]
    assert not files(tmp_path)


def test_room_that_a_chunk_left_is_used_again(tmp_path: Path) -> None:
    with model(tmp_path, HOST) as made:
        made.stepper.reserve([(torch.bfloat16, ELEMS)] * 2)
        for index in range(CHUNKS):
            made.stepper.move(made.chunks[index], DISK)
            made.step()
            made.stepper.finish()
            if index > 0:
                made.stepper.move(made.chunks[index - 1], DEVICE)
        assert files(tmp_path) == ["meshfold-optimizer-rank00003.blocks"]
        assert equal(made.bits(), plain_bits(CHUNKS))


def test_no_memory_for_the_buffers(tmp_path: Path) -> None:
    with pytest.raises(OutOfBudget, match=r"has no .* left"):
        Model(tmp_path, host_bytes=2 * PIECE)
    with model(tmp_path, HOST) as made:
        made.step()
        made.stepper.finish()
        placement = made.memory.host_arena
        used = placement.used_bytes
        placement.budget_bytes = used + 2 * PIECE
        with pytest.raises(OutOfBudget):
            made.stepper.move(made.chunks[0], DISK)
        assert placement.used_bytes == used
        placement.budget_bytes = None
        made.step()
        assert equal(made.bits(), plain_bits(2))


def test_settings_that_cannot_be() -> None:
    with pytest.raises(MemoryPlanError, match="buffers=0"):
        DiskSettings(folder=".", rank=0, buffers=0)
    with pytest.raises(MemoryPlanError, match="piece_bytes=100"):
        DiskSettings(folder=".", rank=0, piece_bytes=100)


# -- many engines in a folder ---------------------------------------------------------------------------------------


def notes_of(made: Model) -> tuple[str, ...]:
    assert made.stepper.disk is not None
    return made.stepper.disk.notes


def test_engines_of_one_process_share_a_folder(tmp_path: Path) -> None:
    with model(tmp_path) as one, model(tmp_path) as two:
        assert files(tmp_path) == [
            "meshfold-optimizer-1-rank00003.blocks",
            "meshfold-optimizer-rank00003.blocks",
        ]
        for _ in range(2):
            one.step()
            two.step()
            one.forward()
            two.forward()
        two.step()
        assert equal(one.bits(), plain_bits(2)) and equal(two.bits(), plain_bits(3))
        one.stepper.close()
        assert files(tmp_path) == ["meshfold-optimizer-1-rank00003.blocks"]
        with model(tmp_path) as three:  # what is free is taken, what is in use is left alone
            assert len(files(tmp_path)) == 2
            assert not notes_of(three)
            two.step()
            assert equal(two.bits(), plain_bits(4))
    assert not files(tmp_path)


@pytest.mark.usefixtures("warm_commands")
def test_what_killed_processes_left_goes_with_a_word_and_nothing_else(tmp_path: Path) -> None:
    """Of other ranks too: the next run may have fewer."""
    script = """
        import os, sys
        from meshfold.zero_gemini.nvme import DiskStore
        stores = [DiskStore(sys.argv[1], rank, {"a": 1 << 20}) for rank in (3, 7)]
        os._exit(1)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], timeout=120, check=False)
    others = {
        "meshfold-optimizer-rank00009.blocks": b"the only copy of a thesis",
        "meshfold-optimizer-1-rank00003.blocks": b"MFBLOCKS, and then something else",
        "thesis.blocks": b"",
    }
    for name, text in others.items():
        (tmp_path / name).write_bytes(text)
    (tmp_path / "meshfold-optimizer-rank00010.blocks").write_bytes(b"")
    (tmp_path / "meshfold-optimizer-rank00011.blocks").symlink_to(tmp_path / "thesis.blocks")
    (tmp_path / "meshfold-optimizer-rank00012.blocks").mkdir()
    assert len(files(tmp_path)) == 8
    with DiskStore(tmp_path, 5, {"a": 4096}) as alive, model(tmp_path) as made:
        found = notes_of(made)
        assert [note.split("-")[-1].split(".")[0] for note in found] == [
            "rank00003",
            "rank00007",
            "rank00010",
        ]
        assert "an empty file" in found[2]
        made.step()
        assert equal(made.bits(), plain_bits(1))
        alive.write("a", torch.ones(4096, dtype=torch.uint8)).wait()
    assert files(tmp_path) == sorted([*others, *(f"meshfold-optimizer-rank000{rank}.blocks" for rank in ("11", "12"))])
    assert all((tmp_path / name).read_bytes() == text for name, text in others.items())


RUN = """
    import sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[2])
    from test_nvme_stepping import equal, files, model, plain_bits
    for _ in range(10):
        with model(Path(sys.argv[1]), count=1) as made:
            made.step()
            made.forward()
            made.step()
            assert equal(made.bits(), plain_bits(2, 1))
            assert not made.stepper.disk.notes
"""


@pytest.mark.usefixtures("warm_commands")
def test_processes_that_come_and_go_in_one_folder(tmp_path: Path) -> None:
    """Nobody takes a file of another for one that was left behind, just as it is made."""
    command = [sys.executable, "-c", textwrap.dedent(RUN), str(tmp_path), str(Path(__file__).parent)]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for process in running:
        _, said = process.communicate(timeout=100)
        assert process.returncode == 0, said
    assert not files(tmp_path)


def test_notes_are_said_once_by_the_first_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refusing(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refusing)
    for rank in (0, 1):
        planes = DiskPlanes(DiskSettings(folder=tmp_path, rank=rank))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            planes.reserve([(planes_of(torch.bfloat16, "A"), 4096)])
        assert len(planes.notes) == 1 and "through the page cache" in planes.notes[0]
        assert [str(word.message) for word in caught] == [f"State on disk: {planes.notes[0]}"] * (rank == 0)
        planes.close()


# -- while it trains ------------------------------------------------------------------------------------------------


@contextmanager
def broken(monkeypatch: pytest.MonkeyPatch, call: str, after: int = 0) -> Iterator[None]:
    """From the call after so many on, a disk that takes or gives nothing."""
    real, left, lock = getattr(os, call), [after], threading.Lock()

    def failing(*arguments: Any) -> Any:
        with lock:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC if call == "pwritev" else errno.EIO, "broken")
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        yield


@pytest.mark.few(4)
@pytest.mark.parametrize("after", [0, 1, 5, 11])
@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_disk_that_breaks_stops_the_step_that_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, after: int
) -> None:
    doing = "written to" if call == "pwritev" else "read from"
    words = rf"state of chunk of p\d to p\d.* could not be {doing} disk.*broken.* resume from the last checkpoint"
    made = Model(tmp_path)
    made.step()
    made.forward()
    made.stepper.finish()

    def train() -> None:
        for _ in range(2):
            made.step()
            made.forward()
        made.stepper.finish()

    with broken(monkeypatch, call, after), pytest.raises(DiskError, match=words) as caught:
        train()
    assert caught.value.errno == (errno.ENOSPC if call == "pwritev" else errno.EIO)
    # The disk is well again, and what was lost is lost: no step, no checkpoint, no move goes by it.
    for again in (made.step, made.stepper.finish, made.bits, lambda: made.stepper.move(made.chunks[0], HOST)):
        with pytest.raises(DiskError, match="resume from the last checkpoint"):
            again()
    made.stepper.close()
    assert not files(tmp_path)
    assert made.memory.host_arena.used_bytes == 0


def test_the_last_step_is_not_lost_in_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Model(tmp_path)
    with broken(monkeypatch, "pwritev"):
        made.step()
        with pytest.raises(DiskError, match="could not be written to disk"):
            made.stepper.close()
    assert not files(tmp_path) and made.memory.host_arena.used_bytes == 0


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_move_to_a_disk_that_breaks_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    with model(tmp_path, HOST, io_bytes=1 << 20) as made:
        made.step()
        made.stepper.finish()
        made.stepper.move(made.chunks[3], DISK)
        made.stepper.reserve([(torch.bfloat16, ELEMS)])  # the room is there: what fails is the writing
        used = made.memory.host_arena.used_bytes
        with broken(monkeypatch, "pwritev", after), pytest.raises(DiskError, match="broken"):
            made.stepper.move(made.chunks[1], DISK)
        assert made.memory.host_arena.used_bytes == used
        made.step()
        made.stepper.finish()
        made.stepper.move(made.chunks[1], DISK)
        made.step()
        assert equal(made.bits(), plain_bits(3))


# -- reading ahead --------------------------------------------------------------------------------------------------


def test_what_comes_next_is_read_while_a_piece_is_stepped_and_what_was_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With three buffers: while a piece is stepped the next two are being read, and memory does not grow."""
    began: list[tuple[str, str]] = []
    with model(tmp_path) as made:
        made.step()
        made.forward()
        made.stepper.finish()
        peak = made.memory.host_arena.used_bytes
        made.memory.host_arena.reset_peak()
        for call in ("read", "write"):
            real = getattr(DiskStore, call)

            def noted(store: DiskStore, name: str, tensor: Tensor, call: str = call, real: Any = real) -> Any:
                began.append((call, name))
                pending = real(store, name, tensor)
                if call == "write":  # a disk that writes faster than anything
                    pending.wait()
                return pending

            monkeypatch.setattr(DiskStore, call, noted)
        kernel = getattr(runs_module, "adam_step")  # noqa: B009 - it is imported there, and not for others

        def stepped(*arguments: Any, **options: Any) -> None:
            began.append(("step", ""))
            kernel(*arguments, **options)

        monkeypatch.setattr(runs_module, "adam_step", stepped)
        # The first three were read before, when nothing else was to do.
        made.step()
        made.forward()
        made.stepper.finish()
        assert made.memory.host_arena.peak_bytes == peak
    reads = [place for place, (what, _) in enumerate(began) if what == "read"]
    steps = [place for place, (what, _) in enumerate(began) if what == "step"]
    writes = [place for place, (what, _) in enumerate(began) if what == "write"]
    assert len(steps) == len(writes) == 3 * CHUNKS
    assert len(reads) == 3 * CHUNKS  # the last three of them for the next step
    for index, read in enumerate(reads[:-3], start=3):
        assert steps[index - 3] < read < steps[index - 2]  # into the first buffer that is free


def test_first_values_touch_each_piece_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever number of parameters it has."""
    wrote: list[str] = []
    real = DiskStore.write

    def noted(store: DiskStore, name: str, tensor: Tensor) -> Any:
        wrote.append(name)
        return real(store, name, tensor)

    monkeypatch.setattr(DiskStore, "write", noted)
    with model(tmp_path, count=2) as made:
        assert len(wrote) <= 6
        disk = made.stepper.disk
        assert disk is not None
        disk.ring.flush()
        assert len(wrote) == len(set(wrote)) == 6


# -- a killed process -----------------------------------------------------------------------------------------------

KILLED = """
    import os, sys, time
    from pathlib import Path
    sys.path.insert(0, sys.argv[2])
    from test_nvme_stepping import Model, HOST, DISK
    made = Model(Path(sys.argv[1]), HOST)
    for chunk in made.chunks[:3]:
        made.stepper.move(chunk, DISK)
    for step in range(10_000):
        made.step()
        made.forward()
        if step == 2:
            print("training", os.getpid(), flush=True)
        time.sleep(0.01)  # the test has work to do meanwhile
"""


def test_kill_in_the_middle_and_start_again(tmp_path: Path, warm_python: str) -> None:
    """The files of the dead process, three here, neither stop the next one nor stay."""
    command = [warm_python, "-c", textwrap.dedent(KILLED), str(tmp_path), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said, pid = process.stdout.readline().split()
        assert said == "training"
        try:
            with model(tmp_path) as beside:  # two runs in one folder, at the same time
                assert len(files(tmp_path)) == 4
                beside.step()
                beside.forward()
                beside.step()
                assert equal(beside.bits(), plain_bits(2))
                assert not notes_of(beside)
            assert len(files(tmp_path)) == 3
        finally:
            os.kill(int(pid), signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert len(files(tmp_path)) == 3
    with model(tmp_path) as made:
        assert files(tmp_path) == ["meshfold-optimizer-rank00003.blocks"]
        words = rf"rank00003.blocks: removed: [\d,]+ bytes left by process {pid}, which was killed"
        assert len(notes_of(made)) == 3 and all(re.search(words, note) for note in notes_of(made))
        made.step()
        made.forward()
        made.step()
        assert equal(made.bits(), plain_bits(2))
    assert not files(tmp_path)


def test_a_chunk_that_is_not_adopted_leaves_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with model(tmp_path, HOST) as made:
        used = made.memory.host_arena.used_bytes
        made.memory.host_arena.budget_bytes = used + 4 * PIECE
        with pytest.raises(OutOfBudget):
            Held(made.chunks[0], "A", "disk", made.stepper.disk)
        assert made.memory.host_arena.used_bytes == used
