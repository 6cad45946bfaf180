"""The device steps chunks of the host's: with the same bits, in the memory that is told, whoever takes which chunk."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank

from stepping_cases import Small, adam, kinds, same

from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.chunks.placement import ChunkPlacement
from meshfold.zero_gemini.errors import OutOfBudget
from meshfold.zero_gemini.memory.arena import Memory
from meshfold.zero_gemini.optimizer import AdamStepper
from meshfold.zero_gemini.optimizer.cpu_executor import Halves, _Deal
from meshfold.zero_gemini.optimizer.gpu_streaming import GpuStreaming, HostState
from meshfold.zero_gemini.optimizer.master_weights import planes_of

HOST = ChunkPlacement(parameters="host", state="host")
SLOT_BYTES = 2**14 * 16  # one piece of the smallest size, or a part of one more


def trained(
    dtype: torch.dtype,
    regime: str,
    *,
    through: bool,
    placements: tuple[ChunkPlacement, ...] = (HOST,),
    halves: bool = False,
) -> list[torch.Tensor]:
    small = Small(adam(regime), dtype, placements)
    if through:
        stepper = small.stepper
        assert isinstance(stepper, AdamStepper)
        streaming = GpuStreaming(memory=small.memory, halves=halves, slot_bytes=4 * SLOT_BYTES, slots=2)
        stepper.stream_on_gpu(streaming)
    for used in ("abcdefg", "acg", "bdef", "abcdefg"):
        small.step(used)
    found = small.bits()
    small.stepper.close()
    return found


@cache
def on_the_cores(dtype: torch.dtype, regime: str) -> list[torch.Tensor]:
    return trained(dtype, regime, through=False)


def taken_by(monkeypatch: pytest.MonkeyPatch, who: str) -> dict[str, int]:
    """Let the device take every chunk, or both some; how many were taken by whom."""
    count = {"cores": 0, "device": 0}
    take = _Deal._next

    def next_chunk(self: _Deal, *, on_device: bool) -> object:
        until = time.monotonic() + 100
        while not on_device and (self._left if who == "device" else not self._on_device):
            assert time.monotonic() < until
            time.sleep(1e-3)
        while on_device and who == "both" and len(self._on_device) == 1 and len(self._left) == 2:
            assert time.monotonic() < until  # the second of three is for the cores
            time.sleep(1e-3)
        found = take(self, on_device=on_device)
        count["device" if on_device else "cores"] += found is not None
        return found

    monkeypatch.setattr(_Deal, "_next", next_chunk)
    return count


@kinds
@pytest.mark.parametrize("who", ["device", "both"])
@pytest.mark.parametrize("halves", [False, True], ids=["all", "parameters"])
def test_the_device_steps_to_the_same_bits(
    dtype: torch.dtype, regime: str, halves: bool, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = on_the_cores(dtype, regime)
    count = taken_by(monkeypatch, who)
    found = trained(dtype, regime, through=True, halves=halves)
    assert same(found, expected)
    assert count["device"] + count["cores"] == 4 * 3  # every chunk of every step, once
    assert count["device"] > 0 and (count["cores"] > 0) == (who == "both")


def test_chunks_on_the_device_are_none_of_its_business(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(torch.bfloat16, "A", through=False, placements=(ChunkPlacement(), HOST, HOST))
    count = taken_by(monkeypatch, "device")
    found = trained(torch.bfloat16, "A", through=True, placements=(ChunkPlacement(), HOST, HOST))
    assert same(found, expected)
    assert count["device"] == 4 * 2


def test_moments_wait_for_what_still_reads_them() -> None:
    """Of a chunk whose parameters alone the device writes, the moments are the cores', when its way through is over."""
    log: list[str] = []

    def note(what: str) -> Callable[[], None]:
        return lambda: log.append(what)

    chunk = cast(Chunk, object())
    for does_all in (True, False):
        steps = Halves(note("cores"), note("moments"), lambda: note("is down"), device_does_all=does_all)
        deal = _Deal({chunk: steps}, {chunk: Future()})
        deal.to_device()
        deal.to_cores()  # finds nothing left
        deal.moments(chunk)
    assert log == ["is down", "moments"]


@pytest.mark.parametrize("regime", ["A", "B", "C"])
def test_moments_stay_where_only_parameters_are_written(regime: str) -> None:
    planes = planes_of(torch.bfloat16, regime)
    tensors = {plane.name: torch.zeros(plane.numel(2**14), dtype=plane.dtype) for plane in planes}
    host = HostState(
        weights=torch.zeros(2**14, dtype=torch.bfloat16),
        planes=planes,
        tensors=tensors,
        gradient=torch.zeros(2**14),
    )
    streaming = GpuStreaming(memory=Memory(torch.device("cpu")), slot_bytes=SLOT_BYTES, slots=1)

    def piece(index: int, state: Any, gradient: torch.Tensor, begin: int) -> None:
        for tensor in vars(state).values():
            tensor.add_(1)

    streaming.step(host, [(0, 2**14)], piece, moments=False)()
    assert bool(host.weights.all()) and bool(tensors.pop("lo").all())
    assert len(tensors) == (4 if regime == "C" else 2) and not any(bool(x.any()) for x in tensors.values())
    streaming.close()


@pytest.mark.parametrize("elements", [1, 2**14, 100_001])
@pytest.mark.parametrize("regime", ["A", "C"])
def test_pieces_cover_every_element_of_the_runs_once(elements: int, regime: str) -> None:
    planes = planes_of(torch.bfloat16, regime)
    host = HostState(
        weights=torch.zeros(elements, dtype=torch.bfloat16),
        planes=planes,
        tensors={plane.name: torch.zeros(plane.numel(elements), dtype=plane.dtype) for plane in planes},
        gradient=torch.arange(elements, dtype=torch.float32),
    )
    streaming = GpuStreaming(memory=Memory(torch.device("cpu")), slot_bytes=2 * SLOT_BYTES, slots=3)
    seen = []

    def piece(index: int, state: object, gradient: torch.Tensor, begin: int) -> None:
        assert gradient[0] == begin
        seen.append((index, begin, begin + gradient.numel()))
        state.hi.add_(1)  # type: ignore[attr-defined]
        state.exp_avg.add_(index + 1)  # type: ignore[attr-defined]

    half = elements // 2 // 256 * 256
    spans = [(0, half), (half, elements)] if half else [(0, elements)]
    streaming.step(host, spans, piece)()
    assert torch.equal(host.weights, torch.ones_like(host.weights))
    assert int(host.tensors["exp_avg"].sum()) == sum((i + 1) * (z - a) for i, (a, z) in enumerate(spans))
    ends = [end for _, _, end in seen]
    assert [begin for _, begin, _ in seen] == [0, *ends[:-1]] and ends[-1] == elements
    streaming.close()


def test_its_memory_is_the_devices_and_goes_back() -> None:
    memory = Memory(torch.device("cpu"), device_bytes=3 * SLOT_BYTES)
    streaming = GpuStreaming(memory=memory, slot_bytes=SLOT_BYTES, slots=3)
    assert memory.compute.used_bytes == 3 * SLOT_BYTES
    streaming.close()
    assert memory.compute.used_bytes == 0
    with pytest.raises(OutOfBudget, match="state passing through"):
        GpuStreaming(memory=memory, slot_bytes=SLOT_BYTES, slots=4)
    assert memory.compute.used_bytes == 0
