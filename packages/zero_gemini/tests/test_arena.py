"""What is accounted is what is allocated, whatever the order of allocations and frees."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshfold.zero_gemini.errors import ArenaError, MemoryPlanError, OutOfBudget
from meshfold.zero_gemini.memory import arena as arena_module
from meshfold.zero_gemini.memory.arena import ROUND_BYTES, Arena
from meshfold.zero_gemini.memory.pinned import PAGE_BYTES

DTYPES = [torch.bfloat16, torch.float32, torch.uint8, torch.int16, torch.float64]


def real_bytes(arena):
    """Bytes of the distinct storages of all live blocks."""
    storages = {block.tensor.untyped_storage().data_ptr(): block.tensor.untyped_storage() for block in arena.blocks}
    assert len(storages) == len(arena.blocks)
    return sum(storage.nbytes() for storage in storages.values())


@given(
    data=st.data(),
    budget=st.one_of(st.none(), st.integers(0, 60_000)),
    pinned=st.booleans(),
    steps=st.integers(1, 30),
)
def test_bytes_accounted_are_bytes_allocated(data, budget, pinned, steps):
    arena = Arena("host", "cpu", budget, pinned=pinned)
    live, peak = [], 0
    for _ in range(steps):
        if live and data.draw(st.booleans()):
            block = live.pop(data.draw(st.integers(0, len(live) - 1)))
            block.free()
            assert block.freed
        else:
            numel, dtype = data.draw(st.integers(1, 5000)), data.draw(st.sampled_from(DTYPES))
            wanted = arena.nbytes(numel, dtype)
            if arena.fits(numel, dtype):
                block = arena.allocate(numel, dtype, "test")
                assert block.nbytes == wanted
                assert block.tensor.shape == (numel,)
                assert block.tensor.dtype is dtype
                assert block.tensor.data_ptr() % (PAGE_BYTES if pinned else 64) == 0
                block.tensor.fill_(1)  # all of it can be written
                live.append(block)
            else:
                before = arena.used_bytes
                with pytest.raises(OutOfBudget) as caught:
                    arena.allocate(numel, dtype)
                assert before + wanted > budget
                assert (caught.value.wanted_bytes, caught.value.used_bytes) == (wanted, before)
                assert caught.value.budget_bytes == budget
                assert arena.used_bytes == before
        peak = max(peak, arena.used_bytes)
        assert arena.blocks == tuple(live)
        assert arena.used_bytes == sum(block.nbytes for block in live) == real_bytes(arena)
        assert arena.peak_bytes == peak
        assert arena.free_bytes == (None if budget is None else budget - arena.used_bytes)
        assert budget is None or arena.used_bytes <= budget
    arena.reset_peak()
    assert arena.peak_bytes == arena.used_bytes


def test_bytes_are_rounded_to_what_the_allocators_give():
    assert Arena("gpu", "cpu").nbytes(1, torch.uint8) == ROUND_BYTES
    assert Arena("gpu", "cpu").nbytes(256, torch.bfloat16) == 512
    assert Arena("gpu", "cpu").nbytes(257, torch.bfloat16) == 1024
    assert Arena("host", "cpu", pinned=True).nbytes(1, torch.uint8) == PAGE_BYTES
    block = Arena("dry run", "meta").allocate(2**40, torch.float32)  # a plan can be tried where nothing fits
    assert block.nbytes == 2**42 == block.tensor.untyped_storage().nbytes()


def test_out_of_budget_tells_who_holds_what():
    arena = Arena("gpu", "cpu", budget_bytes=8192)
    for _ in range(2):
        arena.allocate(1024, torch.bfloat16, "gathered chunks")
    arena.allocate(512, torch.uint8, "norms")
    arena.allocate(512, torch.uint8)
    assert arena.holders() == [("gathered chunks", 4096), ("norms", 512), ("(no purpose given)", 512)]
    with pytest.raises(OutOfBudget) as caught:
        arena.allocate(1024, torch.float32)
    assert str(caught.value) == (
        "arena 'gpu' has no 4,096 bytes left: 5,120 bytes are in use, the budget is 8,192 bytes, 3,072 bytes are free; "
        "most is held by gathered chunks: 4,096 bytes, norms: 512 bytes, (no purpose given): 512 bytes"
    )
    assert "MiB" in str(arena_module._size(3 * 2**20))
    arena.budget_bytes = 5120 + 4096  # a budget may change
    arena.allocate(1024, torch.float32)
    assert arena.free_bytes == 0
    arena.budget_bytes = 10
    assert arena.free_bytes == 0
    assert repr(arena) == "Arena('gpu', cpu, 9,216 bytes of 10 bytes in 5 blocks)"


def test_a_block_is_freed_once_and_gone_then():
    arena = Arena("gpu", "cpu")
    block = arena.allocate(10, torch.float32, "gradient")
    other = arena.allocate(10, torch.float32)
    block.free()
    with pytest.raises(ArenaError, match=r"512 bytes for gradient in arena 'gpu' was freed before"):
        block.free()
    with pytest.raises(ArenaError, match="was freed: its tensor is gone"):
        _ = block.tensor
    assert arena.used_bytes == other.nbytes
    assert arena.blocks == (other,)


def test_wrong_arguments():
    with pytest.raises(MemoryPlanError, match="'x': a budget of -1 bytes"):
        Arena("x", "cpu", -1)
    with pytest.raises(MemoryPlanError, match="only host memory can be pinned"):
        Arena("x", "meta", pinned=True)
    with pytest.raises(ArenaError, match="a block of 0 elements"):
        Arena("x", "cpu").allocate(0, torch.float32)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore lines"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 20 bytes"),
        OSError(12, "Cannot allocate memory"),
    ],
)
def test_a_device_without_memory_is_out_of_budget_too(monkeypatch, error):
    arena = Arena("gpu", "cpu")

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(arena_module.torch, "empty", fail)
    with pytest.raises(OutOfBudget, match=r"'gpu' has no 512 bytes left \(cpu itself has no more: .*allocate"):
        arena.allocate(10, torch.float32)
    assert arena.used_bytes == 0
    assert arena.peak_bytes == 0


def test_other_errors_pass_through_and_account_nothing(monkeypatch):
    arena = Arena("gpu", "cpu")

    def fail(*_, **__):
        raise RuntimeError("something else")

    monkeypatch.setattr(arena_module.torch, "empty", fail)
    with pytest.raises(RuntimeError, match="something else"):
        arena.allocate(10, torch.float32)
    assert arena.used_bytes == 0


def test_a_request_that_no_machine_fulfils():
    arena = Arena("host", "cpu", pinned=True)
    with pytest.raises(OutOfBudget, match="cpu itself has no more"):
        arena.allocate(2**60, torch.uint8)
    assert arena.used_bytes == 0


def test_pinned_memory_is_locked_and_unlocked_exactly(monkeypatch):
    """Without a GPU the driver is a stand-in that notes what it is asked for."""
    locked: dict[int, int] = {}
    log: list[str] = []

    class Runtime:
        status = 0

        def cudaHostRegister(self, address, nbytes, flags):
            assert flags == 1
            log.append("lock")
            if not self.status:
                locked[address] = nbytes
            return self.status

        def cudaHostUnregister(self, address):
            log.append("unlock")
            return locked.pop(address) and 0

    runtime = Runtime()
    monkeypatch.setattr(arena_module.torch, "cuda", SimpleNamespace(is_available=lambda: True, cudart=lambda: runtime))
    arena = Arena("host", "cpu", pinned=True)
    small, large = arena.allocate(100, torch.float32), arena.allocate(3 * 2**20 + 1, torch.uint8)
    assert sorted(locked.values()) == [PAGE_BYTES, 3 * 2**20 + PAGE_BYTES]
    assert sum(locked.values()) == arena.used_bytes == real_bytes(arena)
    view = large.tensor[10:20]
    small.free()
    large.free()
    gc.collect()
    assert list(locked.values()) == [3 * 2**20 + PAGE_BYTES]  # a view is still there: unlocking now would be wrong
    view.fill_(3)
    del view
    gc.collect()
    assert not locked
    assert log == ["lock", "lock", "unlock", "unlock"]

    runtime.status = 2
    with pytest.raises(OutOfBudget, match=r"could not lock 4,096 bytes of host memory \(error 2\)"):
        arena.allocate(100, torch.float32)
    gc.collect()
    assert log[-1] == "lock"  # what was never locked is not unlocked
    assert arena.used_bytes == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_torch_counts_these_bytes():
    gpu, host = Arena("gpu", "cuda"), Arena("host", "cpu", pinned=True)
    before = torch.cuda.memory_allocated()
    blocks = [gpu.allocate(numel, torch.bfloat16) for numel in (1, 1000, 2**20 + 3, 2**24 + 1)]
    assert gpu.used_bytes == real_bytes(gpu)
    more = torch.cuda.memory_allocated() - before - gpu.used_bytes
    assert 0 <= more <= len(blocks) * 2**20  # torch leaves up to 1 MiB of a cached segment to the block it cuts
    source = host.allocate(2**24 + 1, torch.bfloat16)
    assert source.tensor.is_pinned()
    source.tensor.fill_(2)
    blocks[-1].tensor.copy_(source.tensor, non_blocking=True)
    assert blocks[-1].tensor.float().sum().item() == pytest.approx(2 * (2**24 + 1))
    source.free()
    for block in blocks:
        block.free()
    del block
    assert torch.cuda.memory_allocated() == before


def test_threads_share_a_budget():
    arena = Arena("host", "cpu", budget_bytes=20 * 512)
    failures = []

    def work():
        for _ in range(200):
            try:
                blocks = [arena.allocate(10, torch.float32) for _ in range(4)]
            except OutOfBudget:
                continue
            for block in blocks:
                block.free()

    def guarded():
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert arena.peak_bytes <= 20 * 512
    assert arena.used_bytes == sum(block.nbytes for block in arena.blocks) == real_bytes(arena)
