"""Settings of the whole process that an engine makes are put back when it closes, also if it cannot be built."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from meshfold.engine import Engine
from meshfold.engine.zero import process_settings, states
from meshfold.engine.zero.process_settings import Held, grow_segments, limit_allocator

GPU, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)
GIB = 2**30


class Allocator:
    """Fake of torch's caching allocator: GPUs of 64 GiB, of which a process may take a fraction."""

    def __init__(self) -> None:
        self.fractions = {GPU: 1.0, OTHER: 1.0}
        self.settings: list[str] = []

    def set(self, fraction: float, device: torch.device) -> None:
        self.fractions[device] = int(fraction * 64 * GIB) / (64 * GIB)  # it counts bytes

    def limit(self, device: torch.device = GPU) -> float:
        return self.fractions[device] * 64


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    fake = Allocator()
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: fake.fractions[device])
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fake.set)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=64 * GIB))
    monkeypatch.setattr(process_settings, "_limits", {})
    monkeypatch.setattr(
        torch._C, "_accelerator_getAllocatorSettings", lambda: (["", *fake.settings])[-1], raising=False
    )
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", fake.settings.append, raising=False)
    for name in process_settings._VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return fake


def test_a_limit_ends_with_its_request(allocator: Allocator) -> None:
    held = limit_allocator(GPU, 12 * GIB)
    assert (allocator.limit(), allocator.limit(OTHER)) == (12, 64)
    held.close()
    held.close()
    assert allocator.limit() == 64


def test_a_limit_that_cannot_be_divided_evenly_ends_too(allocator: Allocator) -> None:
    held = limit_allocator(GPU, 10**10 + 1)
    held.close()
    assert allocator.limit() == 64


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_limits_the_lower_one_counts_and_the_last_one_closed_puts_back(allocator: Allocator, first: int) -> None:
    allocator.set(0.75, GPU)
    held = [limit_allocator(GPU, 12 * GIB), limit_allocator(GPU, 20 * GIB)]
    assert allocator.limit() == 12
    held[first].close()
    assert allocator.limit() == (20, 12)[first]
    held[1 - first].close()
    assert allocator.limit() == 48


def test_a_limit_of_the_user_is_never_raised(allocator: Allocator) -> None:
    allocator.set(0.25, GPU)
    held = limit_allocator(GPU, 32 * GIB)
    assert allocator.limit() == 16
    held.close()
    assert allocator.limit() == 16


def test_a_limit_that_other_code_has_set_since_stays(allocator: Allocator) -> None:
    held = limit_allocator(GPU, 12 * GIB)
    allocator.set(0.5, GPU)
    held.close()
    assert allocator.limit() == 32


def test_a_request_that_is_dropped_ends(allocator: Allocator) -> None:
    held = limit_allocator(GPU, 12 * GIB)
    del held
    gc.collect()
    assert allocator.limit() == 64


def test_growing_segments_end_with_the_last_request(allocator: Allocator) -> None:
    held = grow_segments(GPU), grow_segments(GPU)
    held[0].close()
    assert allocator.settings == ["expandable_segments:True"]
    held[1].close()
    grow_segments(GPU).close()
    assert allocator.settings == ["expandable_segments:True", "expandable_segments:False"] * 2


@pytest.mark.parametrize("by", ["environment", "program"])
def test_settings_of_the_user_are_kept(allocator: Allocator, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    if by == "environment":
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    else:
        allocator.settings.append("max_split_size_mb:128")
    before = [*allocator.settings]
    grow_segments(GPU).close()
    assert allocator.settings == before


class Requests:
    """Stands in for the functions that ask for a setting: what is asked for and not yet closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open: list[Any] = []
        monkeypatch.setattr(states, "grow_segments", lambda device: self.hold("growing"))
        monkeypatch.setattr(states, "limit_allocator", lambda device, limit: self.hold(limit))

    def hold(self, what: object) -> Held:
        self.open.append(what)
        return Held(self.open.remove, what)


def engine() -> Engine:
    zero = dict(stage=3, gpu_memory_limit="1GiB")
    return Engine(nn.Linear(4, 4), dict(zero=zero), optimizer=dict(name="sgd", lr=0.1), loss_fn=lambda y, x: y.sum())


def test_an_engine_holds_them_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests(monkeypatch)
    with engine() as first:
        first.train_step(torch.ones(2, 4))
        with engine():
            assert requests.open == ["growing", GIB] * 2
        assert requests.open == ["growing", GIB]
    assert not requests.open


@pytest.mark.parametrize("late", ["Residency", "GatherCacheBytes", "limit_allocator"])
def test_an_engine_that_cannot_be_built_leaves_none(monkeypatch: pytest.MonkeyPatch, late: str) -> None:
    requests = Requests(monkeypatch)

    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(states, late, fail)
    with pytest.raises(RuntimeError, match="no"):
        engine()
    assert not requests.open


def test_an_engine_whose_later_parts_fail_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests(monkeypatch)

    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("meshfold.engine.engine.TrainStep", fail)
    with pytest.raises(RuntimeError, match="no"):
        engine()
    assert not requests.open
