"""Blocks on disk: what is written comes back, in order, within bounded memory, with and without direct I/O."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshfold.mesh.testing import tensor_memory
from meshfold.zero_gemini.errors import DiskError
from meshfold.zero_gemini.nvme import DiskStore, Pending, aligned_empty, bench
from meshfold.zero_gemini.nvme import file as nvme_file
from meshfold.zero_gemini.nvme.layout import FileLayout

PAGE = 4096
DTYPES = [torch.uint8, torch.bool, torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.complex64]
per_mode = pytest.mark.parametrize("direct", ["auto", False])


def random_bytes(nbytes: int, seed: int = 0, *, offset: int = 0) -> Tensor:
    """``(nbytes,)`` of uint8 that begin `offset` bytes after a page."""
    target = aligned_empty(nbytes + offset)[offset:]
    return target.random_(generator=torch.Generator().manual_seed(seed))


@per_mode
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    blocks=st.lists(
        st.tuples(
            st.one_of(st.integers(0, 5000), st.sampled_from([1, 511, 512, 1023, 1024, 2048, 3 * 1024])),
            st.sampled_from(DTYPES),
            st.sampled_from([0, 0, 8, 512, 2048]),
        ),
        max_size=6,
    ),
    chunk=st.sampled_from([PAGE, 2 * PAGE, 1 << 20]),
    in_flight=st.integers(1, 4),
)
def test_what_is_written_comes_back(tmp_path: Path, direct: Any, blocks: list[Any], chunk: int, in_flight: int) -> None:
    sources = {
        f"block {index} é": random_bytes(numel * dtype.itemsize, index, offset=offset).view(dtype)
        if dtype is not torch.bool
        else random_bytes(numel, index, offset=offset) > 100
        for index, (numel, dtype, offset) in enumerate(blocks)
    }
    sizes = {name: source.nbytes for name, source in sources.items()}
    with DiskStore(tmp_path, 1, sizes, in_flight, chunk, direct) as store:
        assert store.blocks == sizes
        assert store.path.stat().st_size == store.file_bytes == FileLayout(sizes=sizes, chunk_bytes=chunk).file_bytes
        for pending in [store.write(name, source) for name, source in sources.items()]:
            pending.wait()
        for name, source in sources.items():
            guarded = torch.full((source.nbytes + 128,), 77, dtype=torch.uint8)
            out = guarded[64 : 64 + source.nbytes].view(source.dtype)
            store.read(name, out).wait()
            assert torch.equal(out.view(torch.uint8), source.view(torch.uint8))
            assert bool((guarded[:64] == 77).all() and (guarded[64 + source.nbytes :] == 77).all())
        store.flush()
        store.drop_cache()  # what is read from here on comes from the file
        for name, source in sources.items():
            out = torch.empty_like(source)
            store.read(name, out).wait()
            assert torch.equal(out.view(torch.uint8), source.view(torch.uint8))
    assert not list(tmp_path.iterdir())


@per_mode
def test_operations_on_a_block_keep_their_order(tmp_path: Path, direct: Any) -> None:
    """Hundreds of writes and reads are started without waiting: each read sees the write just before it."""
    nbytes, names = 5 * PAGE + 13, ["a", "b", "c"]
    expected: list[tuple[Tensor, int]] = []
    pending: list[Pending] = []
    with DiskStore(tmp_path, 0, dict.fromkeys(names, nbytes), 8, PAGE, direct) as store:
        for turn in range(120):
            for offset, name in enumerate(names):
                value = (3 * turn + offset) % 251
                pending.append(store.write(name, torch.full((nbytes,), value, dtype=torch.uint8)))
                if turn % 3:
                    out = aligned_empty(nbytes)
                    expected.append((out, value))
                    pending.append(store.read(name, out))
        for each in pending:
            each.wait()
        assert all(each.done() for each in pending)
    assert len(expected) == 240
    for out, value in expected:
        assert bool((out == value).all())


def test_several_pieces_are_on_their_way_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four writes meet at a barrier inside the system call: fewer in flight would never pass it."""
    meeting, pwritev = threading.Barrier(4, timeout=120), os.pwritev
    with DiskStore(tmp_path, 0, {"one": 2 * PAGE, "two": 2 * PAGE}, in_flight=4, chunk_bytes=PAGE) as store:

        def slow(*args: Any) -> int:
            meeting.wait()
            return pwritev(*args)

        monkeypatch.setattr(os, "pwritev", slow)
        first, second = (
            store.write("one", aligned_empty(2 * PAGE)),
            store.write("two", aligned_empty(2 * PAGE)),
        )
        first.wait()
        second.wait()
        assert not meeting.broken


def test_threads_may_share_a_store(tmp_path: Path) -> None:
    sizes = {str(index): 3 * PAGE + index for index in range(8)}
    failures: list[str] = []
    with DiskStore(tmp_path, 0, sizes, in_flight=3, chunk_bytes=PAGE) as store:

        def work(name: str) -> None:
            for turn in range(15):
                source = random_bytes(sizes[name], turn)
                out = torch.empty_like(source)
                store.write(name, source)
                store.read(name, out).wait()
                if not torch.equal(out, source):
                    failures.append(f"{name} in turn {turn}")

        threads = [threading.Thread(target=work, args=(name,)) for name in sizes]
        for thread in threads:
            thread.start()
        store.flush()
        for thread in threads:
            thread.join()
    assert not failures


@pytest.mark.parametrize("short", [1, PAGE - 1, PAGE, PAGE + 100])
@per_mode
def test_short_system_calls_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: Any, short: int
) -> None:
    """A system may move fewer bytes than asked; direct I/O must go on from a page."""
    source = random_bytes(6 * PAGE + 5)
    with DiskStore(tmp_path, 0, {"a": source.nbytes}, direct=direct) as store:
        pwritev, preadv, calls = os.pwritev, os.preadv, []
        step = max(short, PAGE if store.direct else 500)

        def some(call: Any) -> Any:
            def limited(descriptor: int, views: list[memoryview], offset: int) -> int:
                calls.append(offset)
                if store.direct:
                    assert offset % PAGE == 0
                    whole = call(descriptor, [views[0][: -(-step // PAGE) * PAGE]], offset)
                    return int(min(step, whole))
                return int(call(descriptor, [views[0][:step]], offset))

            return limited

        monkeypatch.setattr(os, "pwritev", some(pwritev))
        monkeypatch.setattr(os, "preadv", some(preadv))
        store.write("a", source).wait()
        out = aligned_empty(source.nbytes)
        store.read("a", out).wait()
        assert torch.equal(out, source)
        assert len(calls) > 4


def test_memory_that_direct_io_cannot_reach_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = random_bytes(3 * PAGE), aligned_empty(3 * PAGE)
    theirs, refused = {source.data_ptr(), out.data_ptr()}, []
    with DiskStore(tmp_path, 0, {"a": source.nbytes}) as store:

        def picky(call: Any) -> Any:
            def checked(descriptor: int, views: list[memoryview], offset: int) -> int:
                address = torch.frombuffer(views[0], dtype=torch.uint8).data_ptr()
                if address in theirs:
                    refused.append(address)
                    raise OSError(14, "Bad address")
                return int(call(descriptor, views, offset))

            return checked

        monkeypatch.setattr(os, "pwritev", picky(os.pwritev))
        monkeypatch.setattr(os, "preadv", picky(os.preadv))
        store.write("a", source).wait()
        store.read("a", out).wait()
    assert torch.equal(out, source)
    assert set(refused) == theirs


def test_memory_is_bounded_by_the_pieces_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 MiB that do not begin on a page pass through two buffers of 1 MiB."""
    source = random_bytes(16 << 20, offset=8)
    out = torch.zeros(source.nbytes + 8, dtype=torch.uint8)[8:]
    buffers: list[int] = []
    pieces: list[int] = []

    def buffer(nbytes: int) -> torch.Tensor:
        buffers.append(nbytes)
        return aligned_empty(nbytes)

    def counted(call: Any) -> Any:
        def transfer(descriptor: int, views: Any, offset: int) -> int:
            pieces.extend(map(len, views))
            return int(call(descriptor, views, offset))

        return transfer

    with DiskStore(tmp_path, 0, {"a": source.nbytes}, in_flight=2, chunk_bytes=1 << 20) as store:
        monkeypatch.setattr(nvme_file, "aligned_empty", buffer)
        monkeypatch.setattr(os, "pwritev", counted(os.pwritev))
        monkeypatch.setattr(os, "preadv", counted(os.preadv))
        with tensor_memory() as memory:  # of this thread: nothing is copied before it is handed on
            for _ in range(2):
                store.write("a", source)
                store.read("a", out).wait()
    assert memory.peak < 1 << 20, memory
    assert 1 <= len(buffers) <= 2 and max(buffers) == 1 << 20, buffers
    assert max(pieces) == 1 << 20 and sum(pieces) == 4 * source.nbytes
    assert torch.equal(out, source)


def test_a_finished_request_lets_go_of_the_tensor(tmp_path: Path) -> None:
    with DiskStore(tmp_path, 0, {"a": PAGE}) as store:
        source = random_bytes(PAGE)
        released: list[bool] = []

        weakref.finalize(source.untyped_storage(), released.append, True)
        pending = store.write("a", source)
        pending.wait()
        request = pending._request
        assert request.tensor is None
        assert request.data.size == 0


def test_aligned_tensors_begin_on_a_page() -> None:
    for nbytes in (0, 1, 4095, 4096, 100_001):
        tensor = aligned_empty(nbytes)
        assert tensor.shape == (nbytes,)
        assert tensor.data_ptr() % PAGE == 0 or nbytes == 0
    with pytest.raises(DiskError, match="-3"):
        aligned_empty(-3)


def test_two_stores_of_a_rank_need_two_names(tmp_path: Path) -> None:
    with DiskStore(tmp_path, 0, {"a": 4}, name="generator") as one, DiskStore(tmp_path, 0, {"a": 4}) as two:
        one.write("a", torch.tensor([1.0]))
        two.write("a", torch.tensor([2.0]))
        out = torch.empty(1)
        one.read("a", out).wait()
        assert out.item() == 1.0


@pytest.mark.parametrize("folder", ["here", "/dev/shm"])
def test_bench_measures_and_leaves_nothing(tmp_path: Path, folder: str) -> None:
    where = tmp_path if folder == "here" else Path(folder)
    before = set(where.iterdir())
    rates = bench(where, 3 << 20, in_flight=2, chunk_bytes=1 << 20)
    assert rates.nbytes == 3 << 20
    assert rates.write_bytes_per_s > 0 and rates.read_bytes_per_s > 0
    assert not [path for path in set(where.iterdir()) - before if path.name.startswith("meshfold-bench")]


def test_what_a_caller_can_get_wrong(tmp_path: Path) -> None:
    with DiskStore(tmp_path, 0, {"exp_avg": 16, "other": 8}) as store:
        with pytest.raises(DiskError, match=r"no block 'exp_avv'\. Did you mean 'exp_avg'"):
            store.write("exp_avv", torch.zeros(4))
        with pytest.raises(DiskError, match="block 'exp_avg' has 16 bytes, but the tensor has 12"):
            store.write("exp_avg", torch.zeros(3))
        with pytest.raises(DiskError, match="not contiguous"):
            store.write("exp_avg", torch.zeros(2, 4)[:, ::2])
        with pytest.raises(DiskError, match="on meta"):
            store.read("exp_avg", torch.zeros(4, device="meta"))
        with pytest.raises(DiskError, match="'other' cannot be read: it was never written"):
            store.read("other", torch.zeros(2)).wait()
    for call in (store.flush, lambda: store.read("other", torch.zeros(2))):
        with pytest.raises(DiskError, match="closed"):
            call()
    store.close()
    for wrong in (
        dict(in_flight=0),
        dict(chunk_bytes=1000),
        dict(chunk_bytes=0),
        dict(name="a/b"),
        dict(rank=-1),
    ):
        with pytest.raises(DiskError, match=str(next(iter(wrong.values())))):
            DiskStore(tmp_path, **{"rank": 0, "blocks": {"a": 1}, **wrong})  # type: ignore[arg-type]
    with pytest.raises(DiskError, match="-1"):
        DiskStore(tmp_path, 0, {"a": -1})
    assert not list(tmp_path.iterdir())
