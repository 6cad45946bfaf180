"""Fixed placements, and a plan as a table, a timeline, a picture and a trace."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from meshfold.mesh.errors import MeshfoldError, SpecError
from meshfold.zero_gemini.errors import MemoryPlanError
from meshfold.zero_gemini.planner import (
    H200,
    DoesNotFit,
    GiB,
    Limits,
    MiB,
    Plan,
    Workload,
    chrome_trace,
    const,
    cpu,
    cuda,
    draw,
    plan,
    static,
    timeline,
)
from meshfold.zero_gemini.planner.memory import KINDS, gpu_kinds
from meshfold.zero_gemini.planner.result import options_of, recost

sys.path.append(str(Path(__file__).parent))
from planner_cases import stack


@pytest.fixture(scope="module")
def workload() -> Workload:
    return stack(
        machine=H200,
        layers=16,
        layer_elems=100_000_000,
        tokens=8192,
        kept_bytes=500 * MiB,
        checkpoint_bytes=64 * MiB,
        working_bytes=GiB,
        clip_probability=0.2,
        name="little",
    )


@pytest.fixture(scope="module")
def planned(workload: Workload) -> Plan:
    return plan(workload, H200, Limits(gpu_bytes=12 * GiB))


def test_no_fixed_placement_is_faster_than_the_plan(workload: Workload, planned: Plan) -> None:
    limits = Limits(gpu_bytes=12 * GiB)
    for made in (
        cpu(workload, H200, limits),
        const(workload, H200, limits, boundary_bytes=2 * GiB),
        static(workload, H200, limits, offload_optim_frac=0.8, offload_param_frac=0.7),
        static(workload, H200, limits, offload_optim_frac=1.0),
    ):
        assert made.peak_gpu_bytes <= 12 * GiB
        assert planned.seconds <= made.seconds * (1 + 1e-9)


def test_static_puts_the_last_share_on_the_host(workload: Workload) -> None:
    made = static(workload, H200, offload_optim_frac=0.5, offload_param_frac=0.25)
    places = [(c.state, c.parameters) for c in made.chunks]
    assert places == [("gpu", "gpu")] * 8 + [("host", "gpu")] * 4 + [("host", "host")] * 4
    assert {c.state for c in static(workload, H200).chunks} == {"gpu"}
    whole = static(workload, H200, offload_optim_frac=1, offload_param_frac=1)
    assert whole.chunks == cpu(workload, H200).chunks
    # a share that is not whole chunks is rounded up
    assert [c.state for c in static(workload, H200, offload_optim_frac=0.51).chunks].count("host") == 9
    with pytest.raises(SpecError, match="raise offload_optim_frac"):
        static(workload, H200, offload_param_frac=0.5)
    with pytest.raises(SpecError, match="offload_optim_frac=2"):
        static(workload, H200, offload_optim_frac=2)


def test_const_never_passes_its_boundary(workload: Workload) -> None:
    for boundary in (400_000_000, 700_000_000, 10**9, 4 * 10**9):
        made = const(workload, H200, boundary_bytes=boundary)
        chosen = options_of(made).chunks
        kinds = gpu_kinds(workload)
        held = sum(
            kinds["resident parameters"][i, option] + kinds["gathered"][i, option] for i, option in enumerate(chosen)
        )
        assert held.max() <= boundary
        if boundary < 3 * 10**9:  # one more would pass it
            assert held.max() + 200_000_000 > boundary
    assert {c.parameters for c in const(workload, H200, boundary_bytes=4 * 10**9).chunks} == {"gpu"}
    with pytest.raises(MemoryPlanError, match="boundary_bytes=1000 is below the 400000000 bytes"):
        const(workload, H200, boundary_bytes=1000)


def test_a_placement_that_does_not_fit_says_by_how_much(workload: Workload) -> None:
    with pytest.raises(MemoryPlanError, match=r"placement 'cuda'.*GPU memory.*limit is 8 GiB.*placement 'auto'"):
        cuda(workload, H200, Limits(gpu_bytes=8 * GiB))
    with pytest.raises(MemoryPlanError, match=r"placement 'cpu'.*host memory"):
        cpu(workload, H200, Limits(host_bytes=GiB))
    with pytest.raises(SpecError, match="Did you mean 'layer3'"):
        cuda(workload, H200, kept=["layr3"])


def test_the_refusal_says_what_binds_and_what_to_change(workload: Workload) -> None:
    with pytest.raises(
        DoesNotFit, match=r"the GPU limit binds.*at least .* of GPU memory.*Raise the GPU's limit"
    ) as gpu:
        plan(workload, H200, Limits(gpu_bytes=GiB))
    assert gpu.value.binds == "gpu" and gpu.value.minimum_host_bytes is None
    with pytest.raises(
        DoesNotFit, match=r"the host limit binds.*Raise the host's limit, give it disk, use regime B"
    ) as host:
        plan(workload, H200, Limits(gpu_bytes=5 * GiB, host_bytes=GiB, disk_bytes=0))
    least = host.value.minimum_host_bytes
    assert least is not None
    made = plan(workload, H200, Limits(gpu_bytes=5 * GiB, host_bytes=least, disk_bytes=0))
    assert made.peak_host_bytes == least
    with pytest.raises(DoesNotFit):
        plan(workload, H200, Limits(gpu_bytes=5 * GiB, host_bytes=least - 1, disk_bytes=0))


def test_the_timeline_adds_up(planned: Plan, workload: Workload) -> None:
    timesteps = timeline(planned)
    assert tuple(timestep.bytes for timestep in timesteps) == planned.gpu_bytes
    assert [timestep.phase for timestep in timesteps] == ["forward"] * 16 + ["backward"] * 16
    assert all(tuple(timestep.kinds) == KINDS for timestep in timesteps)
    starts = [timestep.seconds for timestep in timesteps]
    assert starts[0] == 0 and starts == sorted(set(starts)) and starts[-1] < planned.seconds
    for timestep in timesteps:
        assert timestep.kinds["non-model"] == workload.non_model_bytes[timestep.index]


def test_a_plan_can_be_judged_again_for_another_machine(planned: Plan) -> None:
    same = recost(planned, planned.workload, planned.machine)
    assert (same.seconds, same.terms, same.chunks, same.layers) == (
        planned.seconds,
        planned.terms,
        planned.chunks,
        planned.layers,
    )
    slower = recost(planned, planned.workload, replace(planned.machine, host_memory=planned.machine.host_memory / 3))
    assert (slower.chunks, slower.layers, slower.gpu_bytes) == (
        planned.chunks,
        planned.layers,
        planned.gpu_bytes,
    )
    assert slower.seconds > 1.5 * planned.seconds


def test_the_table_shows_every_limit_and_marks_what_binds(planned: Plan) -> None:
    text = str(planned)
    assert "little on one H200" in text and "12.00 GiB" in text and "125.00 GiB" in text
    assert text.count("<") == len(planned.binding) == len(planned.phases)
    for term in planned.terms:
        assert term.name in text
    assert f"{planned.seconds:.4g} s a step" in text
    assert max(len(line) for line in text.splitlines()) < 130
    assert len(text.splitlines()) < 60


def test_the_trace_is_one_that_chrome_reads(planned: Plan) -> None:
    trace = json.loads(json.dumps(chrome_trace(planned)))
    counters = [event for event in trace["traceEvents"] if event["ph"] == "C"]
    assert [sum(event["args"].values()) for event in counters] == list(planned.gpu_bytes)
    busy = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert all(event["dur"] > 0 and event["ts"] >= 0 for event in busy)
    timesteps = [event for event in busy if event["tid"] == 0]
    assert len(timesteps) == planned.workload.timesteps
    assert sum(event["dur"] for event in timesteps) == pytest.approx(planned.seconds * 1e6)


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_the_picture_is_drawn(planned: Plan, tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib, the extra 'plot'")
    where = draw(planned, tmp_path / f"plan.{ending}")
    start = where.read_bytes()[:200]
    assert (b"<?xml" in start) if ending == "svg" else start.startswith(b"\x89PNG")
    with pytest.raises(MeshfoldError, match="ends in one of"):
        draw(planned, tmp_path / "plan.docx")


def test_without_matplotlib_the_error_says_what_to_install(
    planned: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MeshfoldError, match=r"pip install meshfold-zero-gemini\[plot\]"):
        draw(planned, tmp_path / "plan.svg")


def test_planning_does_not_import_matplotlib(torch_python: str) -> None:
    code = "import sys, meshfold.zero_gemini.planner; print('matplotlib' in sys.modules)"
    out = subprocess.run([torch_python, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
