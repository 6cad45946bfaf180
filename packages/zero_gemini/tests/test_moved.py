"""Names of version 0.1 give the modules and attributes of today."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch

from meshfold import zero_gemini
from meshfold.mesh import with_old_names
from meshfold.zero_gemini import ChunkPlacement, Memory, planner, profiler
from meshfold.zero_gemini.moved import MOVED, install
from meshfold.zero_gemini.optimizer import dispatch, optimizer_kind
from meshfold.zero_gemini.planner import H200, REGIMES, ChunkCost, Workload


@pytest.mark.parametrize("old", sorted(MOVED))
def test_an_old_path_is_the_module_of_today(old: str) -> None:
    install()
    with pytest.warns(DeprecationWarning, match=f"{old} is now {MOVED[old]}: change the import"):
        found = import_module(old)
    assert found is import_module(MOVED[old])
    assert found.__spec__ is not None and found.__spec__.name == found.__name__ == MOVED[old]
    del sys.modules[old]


def test_modules_of_a_moved_folder_and_renamed_functions_keep_their_old_names() -> None:
    with pytest.warns(DeprecationWarning, match="profiler"):
        found = import_module("meshfold.zero_gemini.trace.tracer")
    assert found is import_module("meshfold.zero_gemini.profiler.tracer")
    for old in ("meshfold.zero_gemini.trace.tracer", "meshfold.zero_gemini.trace"):
        del sys.modules[old]
    with pytest.warns(DeprecationWarning, match="optimizer_kind"):
        assert dispatch.kind_of is optimizer_kind


def test_renamed_classes_attributes_and_arguments_keep_their_old_names() -> None:
    @with_old_names({"old": "new"}, arguments={"before": "new"})
    class Named:
        def __init__(self, new: int) -> None:
            self.new = new

    make: Any = Named
    with pytest.warns(DeprecationWarning, match=r"Named\(before=...\) is now Named\(new=...\)"):
        named = make(before=1)
    with pytest.warns(DeprecationWarning, match=r"Named\.old is now Named\.new"):
        assert named.old == 1
    with pytest.warns(DeprecationWarning, match="is now"):
        named.old = 2
    assert named.new == 2
    with pytest.warns(DeprecationWarning, match="is now meshfold.zero_gemini.ChunkPlacement"):
        assert zero_gemini.Home is ChunkPlacement
    memory: Any = Memory(torch.device("cpu"))
    with pytest.warns(DeprecationWarning, match="host_arena"):
        assert memory.home is memory.host_arena
    old_rates: Any = {"passage": 2e9, "beside_passage": 3e9, "passage_bytes": 4}
    with pytest.warns(DeprecationWarning, match="passage") as warned:
        machine: Any = replace(H200, **old_rates)
    assert len(warned) == 3
    assert "Machine(passage=...) is now Machine(gpu_streaming=...)" in {str(one.message) for one in warned}
    assert (machine.gpu_streaming, machine.host_memory_while_streaming, machine.streaming_bytes) == (2e9, 3e9, 4)
    with pytest.warns(DeprecationWarning, match=r"Machine\.passage is now Machine\.gpu_streaming"):
        assert machine.passage == 2e9


def test_plans_called_timesteps_moments_once() -> None:
    old: Any = {"forward_moments": 1}
    used: Any = dict(forward=(0, 0), backward=(1, 1), forward_seconds=1.0, backward_seconds=1.0)
    chunk = ChunkCost(name="w", elems=1, gathered_elems=1, **used)
    with pytest.warns(
        DeprecationWarning, match=r"Workload\(forward_moments=...\) is now Workload\(forward_timesteps=...\)"
    ):
        workload: Any = Workload(
            name="one", chunks=(chunk,), non_model_bytes=(1, 2), tokens=1, regime=REGIMES["A"], clipping=True, **old
        )
    with pytest.warns(DeprecationWarning, match=r"Workload\.moments is now Workload\.timesteps"):
        assert (workload.moments, workload.forward_timesteps) == (2, 1)
    for module, before, now in (
        (planner, "Moment", planner.Timestep),
        (profiler, "TracedMoment", profiler.TracedTimestep),
    ):
        with pytest.warns(DeprecationWarning, match=f"{before} is now"):
            assert getattr(module, before) is now
    with pytest.warns(DeprecationWarning, match=r"Trace\(moments=...\) is now Trace\(timesteps=...\)"):
        trace: Any = profiler.Trace(moments=())
    with pytest.warns(DeprecationWarning, match=r"Trace\.forward_moments is now"):
        assert trace.forward_moments == 0
