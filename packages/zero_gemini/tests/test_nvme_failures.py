"""What can go wrong with a disk: each is a clear error, before training where that can be, and nothing is lost or left."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from meshfold.zero_gemini.errors import DiskError
from meshfold.zero_gemini.nvme import DiskStore, aligned_empty
from meshfold.zero_gemini.nvme.folder import block_path, sweep
from meshfold.zero_gemini.nvme.layout import FileLayout, Header

PAGE = 4096
SIZES = {"first": 3 * PAGE + 7, "second": PAGE}


def nothing_in(folder: Path) -> bool:
    return not list(folder.iterdir())


# ---- before training ------------------------------------------------------------------------------------------------


def test_a_missing_folder_names_its_nearest_parent(tmp_path: Path) -> None:
    with pytest.raises(DiskError) as caught:
        DiskStore(tmp_path / "no" / "such", 0, SIZES)
    assert f"{tmp_path}/no/such does not exist ({tmp_path} does)" in str(caught.value)


def test_a_file_or_a_dead_link_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path in ("file", "file/below"):
        with pytest.raises(DiskError, match="file is not a folder"):
            DiskStore(tmp_path / path, 0, SIZES)
    with pytest.raises(DiskError, match="link to nowhere"):
        DiskStore(tmp_path / "link", 0, SIZES)


def test_a_folder_that_takes_no_files() -> None:
    """/sys and /proc refuse new files even to root."""
    with pytest.raises(DiskError, match="user may write") as caught:
        DiskStore("/sys", 0, SIZES)
    assert caught.value.errno in (errno.EACCES, errno.EROFS, errno.EPERM)
    with pytest.raises(DiskError, match="cannot be opened"):
        DiskStore("/proc", 0, SIZES)


def test_a_full_disk_says_what_is_missing(tmp_path: Path) -> None:
    wanted = FileLayout(sizes={"a": 1 << 60}, chunk_bytes=16 << 20).file_bytes
    with pytest.raises(
        DiskError, match=rf"No space for {tmp_path}.*: {wanted} bytes are wanted, \d+ are free"
    ) as caught:
        DiskStore(tmp_path, 0, {"a": 1 << 60})
    assert caught.value.errno == errno.ENOSPC
    assert nothing_in(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_while_it_is_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Quotas and other ranks are not seen in the free space: the reservation itself fails."""

    def full(descriptor: int, start: int, length: int) -> None:
        os.pwrite(descriptor, b"part", length // 2)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskError, match=r"bytes are wanted.*quota") as caught:
        DiskStore(tmp_path, 0, SIZES)
    assert caught.value.errno == number
    assert nothing_in(tmp_path)


@pytest.mark.usefixtures("warm_commands")
def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    """The system itself refuses the reservation: RLIMIT_FSIZE of a process of its own."""
    script = f"""
        import errno, resource
        from meshfold.zero_gemini.nvme import DiskStore
        from meshfold.zero_gemini.errors import DiskError
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        DiskStore({str(tmp_path)!r}, 0, {{"small": 1 << 19}}).close()
        try:
            DiskStore({str(tmp_path)!r}, 0, {{"large": 1 << 21}})
        except DiskError as error:
            print(error.errno == errno.EFBIG, error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("True") and "ulimit -f" in done.stdout, done
    assert nothing_in(tmp_path)


def test_a_file_system_without_reservation_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(descriptor: int, start: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    filled: list[int] = []
    pwrite = os.pwrite

    def counted(descriptor: int, data: Any, offset: int) -> int:
        filled.append(pwrite(descriptor, data, offset))
        return filled[-1]

    monkeypatch.setattr(os, "posix_fallocate", unknown)
    monkeypatch.setattr(os, "pwrite", counted)
    with DiskStore(tmp_path, 0, {"a": 3 << 20}) as store:
        assert sum(filled) >= 3 << 20 and store.path.stat().st_size >= 3 << 20
        store.write("a", torch.ones(3 << 20, dtype=torch.uint8)).wait()


def test_no_direct_io_is_a_note_or_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refusing(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(DiskError, match="refuses O_DIRECT"):
        DiskStore(tmp_path, 0, SIZES, direct=True)
    assert nothing_in(tmp_path)
    with DiskStore(tmp_path, 0, SIZES) as store:
        assert not store.direct
        assert "no direct I/O here (Invalid argument)" in store.notes[0]
        out = torch.empty(PAGE, dtype=torch.uint8)
        store.write("second", torch.ones(PAGE, dtype=torch.uint8))
        store.read("second", out).wait()
        assert int(out.sum()) == PAGE


def test_direct_io_that_fails_only_when_used_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems take the flag and refuse the write."""
    real = os.pwritev

    def refusing(descriptor: int, views: Any, offset: int) -> int:
        monkeypatch.setattr(os, "pwritev", real)
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "pwritev", refusing)
    with DiskStore(tmp_path, 0, SIZES) as store:
        assert not store.direct and len(store.notes) == 1


def test_too_many_threads_is_an_error_that_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, []

    def limited(thread: threading.Thread) -> None:
        started.append(thread)
        if len(started) > 3:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(DiskError, match="no threads for in_flight=8"):
        DiskStore(tmp_path, 0, SIZES)
    assert nothing_in(tmp_path)


# ---- whose file it is -----------------------------------------------------------------------------------------------


def test_two_live_stores_on_one_file_are_refused(tmp_path: Path) -> None:
    with DiskStore(tmp_path, 0, SIZES) as store:
        store.write("second", torch.full((PAGE,), 5, dtype=torch.uint8)).wait()
        with pytest.raises(DiskError, match="in use by this process"):
            DiskStore(tmp_path, 0, {"x": 1})
        out = torch.empty(PAGE, dtype=torch.uint8)
        store.read("second", out).wait()
        assert int(out.min()) == 5
    DiskStore(tmp_path, 0, SIZES).close()


def test_foreign_files_are_neither_read_nor_overwritten(tmp_path: Path) -> None:
    path = block_path(tmp_path, "optimizer", 0)
    path.write_bytes(b"the only copy of a thesis")
    with pytest.raises(DiskError, match="is not overwritten"):
        DiskStore(tmp_path, 0, SIZES)
    assert path.read_bytes() == b"the only copy of a thesis"
    path.rename(tmp_path / "thesis")
    path.symlink_to(tmp_path / "thesis")
    with pytest.raises(DiskError, match="is a link"):
        DiskStore(tmp_path, 0, SIZES)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DiskError, match="not a plain file"):
        DiskStore(tmp_path, 0, SIZES)


def test_a_header_that_is_not_whole_is_noticed(tmp_path: Path) -> None:
    """One that is cut short or has a changed byte is left to a person, and replaced by a store that wants its name."""
    with DiskStore(tmp_path, 0, SIZES) as store:
        path, good = store.path, store.path.read_bytes()
    assert nothing_in(tmp_path)
    damaged = [good[:spot] + bytes([good[spot] ^ 0x10]) + good[spot + 1 :] for spot in (*range(8, 24), 80, 4095)]
    for left in (damaged[0], damaged[-1], good[: PAGE - 1], good[:20]):
        path.write_bytes(left)
        assert sweep(tmp_path) == [] and path.read_bytes() == left
        with DiskStore(tmp_path, 0, SIZES) as store:
            assert "replaced an unusable file" in store.notes[0]
            assert ("is truncated" if len(left) < PAGE else "is damaged") in store.notes[0]
    for left in damaged:
        with pytest.raises(DiskError, match="damaged"):
            Header.unpack(left[:PAGE], str(path))
    for spot in range(8):
        with pytest.raises(DiskError, match="not a Meshfold block file"):
            Header.unpack(good[:spot] + b"?" + good[spot + 1 : PAGE], str(path))
    assert Header.unpack(good[:PAGE], str(path)).pid == os.getpid()
    path.write_bytes(good)
    (note,) = sweep(tmp_path)
    assert f"left by process {os.getpid()}," in note and nothing_in(tmp_path)


def test_a_store_that_nobody_closes_leaves_no_file(tmp_path: Path) -> None:
    pending = DiskStore(tmp_path, 0, SIZES).write("second", torch.ones(PAGE, dtype=torch.uint8))
    pending.wait()
    until = time.monotonic() + 100.0
    while not nothing_in(tmp_path) and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    assert nothing_in(tmp_path)


def test_a_forked_child_can_neither_use_nor_remove_the_store(tmp_path: Path) -> None:
    with DiskStore(tmp_path, 0, SIZES) as store:
        store.write("second", torch.ones(PAGE, dtype=torch.uint8)).wait()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                store.read("second", torch.empty(0))
            except DiskError:
                status = 2
            try:
                store.flush()
            except DiskError as error:
                status = 0 if "forked child" in str(error) and status == 2 else 3
            store.close()
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        out = torch.empty(PAGE, dtype=torch.uint8)
        store.read("second", out).wait()
        assert store.path.exists()


WRITER = """
    import os, sys, torch
    from meshfold.zero_gemini.nvme import DiskStore
    store = DiskStore(sys.argv[1], 0, {"a": 1 << 23, "b": 1 << 23}, in_flight=4, chunk_bytes=1 << 16)
    turn = 0
    while True:
        for name in "ab":
            pending = store.write(name, torch.full((1 << 23,), turn % 256, dtype=torch.uint8))
            if turn == 0:
                pending.wait()
        turn += 1
        if turn == 2:
            print("writing", os.getpid(), flush=True)
        if turn > 2:
            pending.wait()
"""


def test_kill_in_the_middle_of_a_write(tmp_path: Path, warm_python: str) -> None:
    command = [warm_python, "-c", textwrap.dedent(WRITER), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said, pid = process.stdout.readline().split()
        assert said == "writing"
        with pytest.raises(DiskError, match=f"in use by process {pid}"):
            DiskStore(tmp_path, 0, SIZES)
        os.kill(int(pid), signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size > 2 << 23
    with DiskStore(tmp_path, 0, SIZES) as store:
        assert store.notes[0] == f"{path}: replaced the file of process {pid}, which no longer uses it."
        source, out = torch.randint(0, 255, (PAGE,), dtype=torch.uint8), torch.empty(PAGE, dtype=torch.uint8)
        store.write("second", source)
        store.read("second", out).wait()
        assert torch.equal(out, source)
        with pytest.raises(DiskError, match="never written"):
            store.read("first", torch.empty(SIZES["first"], dtype=torch.uint8)).wait()
    assert nothing_in(tmp_path)


# ---- in mid-run -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full, a device that is always full, is of Linux")
@pytest.mark.parametrize("direct", ["auto", False])
def test_a_disk_that_is_full_in_mid_run(tmp_path: Path, direct: Any) -> None:
    """The block of the failed write is refused until it is written again; the source and other blocks are whole."""
    source = torch.randint(0, 255, (SIZES["first"],), dtype=torch.uint8)
    kept, other = source.clone(), torch.full((PAGE,), 9, dtype=torch.uint8)
    with DiskStore(tmp_path, 0, SIZES, direct=direct, chunk_bytes=PAGE) as store:
        for name, block in (("first", source), ("second", other)):
            store.write(name, block).wait()
        good = os.dup(store._file.data)
        full = os.open("/dev/full", os.O_RDWR)
        os.dup2(full, store._file.data)
        pending = store.write("first", source)
        with pytest.raises(
            DiskError, match=r"writing block 'first' failed at byte \d+ of 12295: No space left"
        ) as caught:
            pending.wait()
        assert caught.value.errno == errno.ENOSPC
        os.dup2(good, store._file.data)
        os.close(good)
        os.close(full)
        with pytest.raises(DiskError, match="No space left"):
            pending.wait()
        assert torch.equal(source, kept)
        out = torch.empty_like(source)
        with pytest.raises(DiskError, match=r"'first' cannot be read: the last write of it failed: .*No space left"):
            store.read("first", out).wait()
        with pytest.raises(DiskError, match="1 blocks did not reach the disk, the first is 'first'"):
            store.flush()
        there = torch.empty_like(other)
        store.read("second", there).wait()
        assert torch.equal(there, other)
        store.write("first", source).wait()
        store.flush()
        store.read("first", out).wait()
        assert torch.equal(out, source)


def test_a_store_with_a_torn_block_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    store = DiskStore(tmp_path, 0, SIZES)
    monkeypatch.setattr(os, "pwritev", broken)
    store.write("second", torch.ones(PAGE, dtype=torch.uint8))
    with pytest.raises(DiskError, match=r"'second': .*Input/output error"):
        store.flush()
    store.close()
    assert nothing_in(tmp_path)


def test_a_failed_sync_makes_no_block_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed sync the system forgets the error, and a second sync would succeed."""
    real = os.fsync

    def once(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", real)
        raise OSError(errno.EIO, "Input/output error")

    with DiskStore(tmp_path, 0, SIZES) as store:
        for name, nbytes in SIZES.items():
            store.write(name, torch.ones(nbytes, dtype=torch.uint8))
        monkeypatch.setattr(os, "fsync", once)
        for words in ("could not be synced", "2 blocks did not reach the disk"):
            with pytest.raises(DiskError, match=words):
                store.flush()
        with pytest.raises(DiskError, match="could not be synced"):
            store.read("second", torch.empty(PAGE, dtype=torch.uint8)).wait()
        with pytest.raises(DiskError, match="did not reach the disk"):
            store.flush()


@pytest.mark.parametrize("direct", ["auto", False])
def test_a_file_truncated_under_a_live_store(tmp_path: Path, direct: Any) -> None:
    with DiskStore(tmp_path, 0, SIZES, direct=direct) as store:
        store.write("second", torch.ones(PAGE, dtype=torch.uint8)).wait()
        size = store.file_bytes - 10
        os.truncate(store.path, size)
        words = f"reading block 'second' failed at byte 0 of 4096: it is truncated to {size} of"
        with pytest.raises(DiskError, match=words):
            store.read("second", aligned_empty(PAGE)).wait()
