"""Memory plans made again from what a run recorded: the steps that were measured took as long, and as much memory, as planned."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from meshfold.engine.zero.device_limit import CONTEXT_BYTES, DeviceLimit
from meshfold.mesh.spec import parse_bytes
from meshfold.zero_gemini.planner import ChunkCost, Layer, Limits, Machine, Plan, Regime, Workload, plan

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def recorded() -> dict[str, dict[str, Any]]:
    """Runs under a limit of memory, by name, whose JSON has what their plans were made from."""
    found = {}
    for path in sorted(RESULTS.glob("hugging_face*.json")):
        for name, case in json.loads(path.read_text())["cases"].items():
            for run in case["runs"].get("ours", ()):
                if case["work"]["gpu_memory"] and "workload" in run.get("plan", {}):
                    limits = {memory: case["work"].get(memory, "") for memory in ("gpu_memory", "host_memory")}
                    found[f"{path.stem}: {name}"] = run | limits
    return found


RECORDED = recorded()


def made_again(run: Mapping[str, Any]) -> Plan:
    """Plan the run's workload on its machine within its limit, as the engine does."""
    words, limit = run["plan"], parse_bytes(run["gpu_memory"])
    host = parse_bytes(run["host_memory"]) if run["host_memory"] else None
    limits = Limits(gpu_bytes=DeviceLimit(bytes=limit, outside=CONTEXT_BYTES).plan_bytes, host_bytes=host, disk_bytes=0)
    return plan(workload_of(words["workload"]), Machine(**words["machine"]), limits)


def workload_of(words: Mapping[str, Any]) -> Workload:
    """Read a workload from JSON, also of a time when timesteps or shadow copies had another name."""
    words = {key.replace("_moments", "_timesteps").replace("second_", "shadow_"): words[key] for key in words}
    tuples = {key: tuple(value) for key, value in words.items() if isinstance(value, list)}
    chunks = tuple(
        ChunkCost(
            **{
                **chunk,
                "forward": tuple(chunk["forward"]),
                "backward": tuple(chunk["backward"]),
                "visits": None if chunk["visits"] is None else tuple(map(tuple, chunk["visits"])),
            }
        )
        for chunk in words["chunks"]
    )
    return Workload(
        **{
            **words,
            **tuples,
            "regime": Regime(**words["regime"]),
            "chunks": chunks,
            "layers": tuple(Layer(**layer) for layer in words["layers"]),
            "light_timesteps": frozenset(words["light_timesteps"]),
        }
    )


@pytest.mark.few(2)
@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_run_is_planned_within_a_tenth_of_its_time(name: str) -> None:
    run = RECORDED[name]
    found, took = made_again(run), median(run["seconds"])
    assert abs(found.seconds / took - 1) <= 0.10, f"planned {found.seconds:.4f} s, measured {took:.4f} s\n{found}"
    assert abs(found.peak_gpu_bytes / run["peak_bytes"] - 1) <= 0.05
    assert found.seconds <= run["plan"]["seconds"] * (1 + 1e-6), "a plan made again is as fast as the one that ran"


def test_there_are_recorded_runs() -> None:
    assert {run["gpu_memory"] for run in RECORDED.values()} >= {"24GiB", "12GiB"}
