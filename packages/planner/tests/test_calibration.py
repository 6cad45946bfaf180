"""Calibration: fits of made-up samples, machines as files, and a tiny measurement on two ranks."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshfold.mesh import Mesh, SpecError, all_reduce, start
from meshfold.mesh.model_io import Operator
from meshfold.mesh.testing import ranks
from meshfold.planner import MACHINES, find_machine
from meshfold.planner.calibration import (
    TINY,
    MatmulSample,
    MessageSample,
    calibrate,
    calibration_table,
    fit_line,
    fit_link,
    fit_links,
    matmul_rates,
    matmul_shares,
    measured_link,
    pace_of,
    read_machine,
    seconds_by_size,
    typical_link,
    write_machine,
)
from meshfold.planner.calibration.fits import share_and_lag
from meshfold.planner.calibration.measure import _small_groups
from meshfold.planner.calibration.messages import hidden_of
from meshfold.planner.calibration.operators import calls_of, moved, operator_rates
from meshfold.planner.calibration.samples import (
    layer_rates,
    matmul_samples,
    output_samples,
    row_shares,
    side_samples,
)
from meshfold.planner.calibration.timing import Pace, call_seconds
from meshfold.planner.clock import Work
from meshfold.planner.efficiency import Efficiency, Launches, Link
from meshfold.planner.machines import Host

H200 = MACHINES["h200x8"]
SIZES = [1024 * 4**n for n in range(8)]


def test_a_line_is_found_again() -> None:
    latency, slope = fit_line([(size, 2e-5 + size / 3e9) for size in SIZES])
    assert (latency, 1 / slope) == (pytest.approx(2e-5), pytest.approx(3e9))


@pytest.mark.parametrize(
    "points",
    [[(1e3, 1.0)], [(1e3, 2.0), (1e6, 1.0)], [(1e3, 1e-9), (1e6, 1.0)], [(5.0, 1.0), (5.0, 1.0)]],
)
def test_no_fit_has_a_negative_latency_or_rate(points: list[tuple[float, float]]) -> None:
    latency, slope = fit_line(points)
    assert latency >= 0 and slope >= 0 and latency + slope > 0


def test_the_error_is_of_sizes_that_the_fit_has_not_seen() -> None:
    exact = [MessageSample(kind="all_reduce", sent=size, seconds=1e-5 + size / 1e9) for size in SIZES]
    assert fit_link(exact).error == pytest.approx(0, abs=1e-9)
    # Every second size takes twice as long: a fit to the others misses them by half.
    odd = [replace(one, seconds=one.seconds * (1 + n % 2)) for n, one in enumerate(exact)]
    assert fit_link(odd).error == pytest.approx(0.5)
    assert math.isnan(fit_link(exact[:1]).error)


def test_links_by_kind_and_the_usual_one() -> None:
    samples = [
        MessageSample(kind=kind, sent=size, seconds=latency + size / rate)
        for kind, latency, rate in (("all_reduce", 1e-5, 1e9), ("shift", 3e-5, 3e9))
        for size in SIZES
    ]
    links = fit_links(samples)
    assert links["shift"].rate == pytest.approx(3e9) and links["all_reduce"].latency == pytest.approx(1e-5)
    usual = typical_link(links)
    assert (usual.latency, usual.rate) == (pytest.approx(2e-5), pytest.approx(1.5e9))
    with pytest.raises(ValueError, match="no link"):
        typical_link({})


def test_seconds_by_size_never_fall_and_lie_between_measured_ones() -> None:
    """NCCL on two H100s: noise of a third below 4 MiB, and no more at 16 MiB, where α–β is a fifth too high."""
    sent = [1024.0 * 4**n for n in range(10)]
    took = [114e-6, 65e-6, 117e-6, 92e-6, 96e-6, 91e-6, 95e-6, 119e-6, 320e-6, 1110e-6]
    samples = [MessageSample(kind="all_reduce", sent=a, seconds=b) for a, b in zip(sent, took, strict=True)]
    pairs = seconds_by_size(samples)
    assert [a for a, _ in pairs] == sent and [b for _, b in pairs] == sorted(b for _, b in pairs)
    assert math.prod(b for _, b in pairs) == pytest.approx(math.prod(took))
    link = measured_link(samples)
    assert link.seconds(sent[-2]) == pytest.approx(320e-6) and link.seconds(sent[7]) == pytest.approx(119e-6)
    assert link.seconds(2 * sent[-2], 2) == pytest.approx(2 * 320e-6)
    assert link.seconds((sent[-2] + sent[-1]) / 2) == pytest.approx((320e-6 + 1110e-6) / 2)
    assert (
        link.seconds(2 * sent[-1] - sent[-2]) == pytest.approx(2 * 1110e-6 - 320e-6) and link.seconds(1) == pairs[0][1]
    )
    assert fit_link(samples).seconds(sent[7]) > 1.15 * 119e-6
    exact = [replace(one, seconds=max(1e-4, 1e-4 + (one.sent - sent[6]) / 1e11)) for one in samples]
    assert measured_link(exact).error == pytest.approx(0, abs=1e-9)
    assert fit_link(exact).error > 0.05


def test_shares_of_matmuls_never_fall_with_their_size() -> None:
    speeds = {64: 1e12, 128: 4e12, 256: 3e12, 512: 8e12}
    samples = [
        MatmulSample(precision="bf16", side=side, seconds=2 * side**3 / rate) for side, rate in reversed(speeds.items())
    ]
    assert matmul_rates(samples) == {"bf16": pytest.approx(8e12)}
    shares = [share for _, share in matmul_shares(samples, matmul_rates(samples))["bf16"]]
    assert shares == [pytest.approx(share) for share in (1 / 8, 1 / 2, 1 / 2, 1)]


def test_small_matmuls_take_longer_on_a_measured_machine() -> None:
    reached = Efficiency(matmuls=0.5, by_flop={"bf16": ((1e6, 0.25), (1e8, 0.75), (1e10, 1.0))})
    assert [reached.of_matmul("bf16", flop) for flop in (1e3, 1e7, 1e12)] == [0.125, pytest.approx(0.25), 0.5]
    assert reached.of_matmul("fp32", 1e3) == 0.5  # not measured: as large ones
    machine = replace(H200, flops={"bf16": 1e12}, memory_rate=1e9, launches=Launches.of_all(0.0), efficiency=reached)
    work = Work(operators={Operator(10**7): 3, Operator(0, bytes=10**9): 1})
    assert work.seconds(machine, "bf16") == pytest.approx(3 * 1e7 / 0.25e12 + 1)
    half = replace(machine, efficiency=replace(reached, elementwise=0.5))
    assert half.launches.forward == 0 and work.seconds(half, "bf16") == pytest.approx(3 * 1e7 / 0.25e12 + 2)


def test_a_measured_kind_takes_its_own_link_inside_a_node() -> None:
    machine = replace(
        H200, latency=1.0, inside=100.0, between=10.0, collectives={"shift": Link(latency=5.0, rate=50.0)}
    )
    assert machine.message_seconds("shift", 100, machine.inside, calls=2) == 12.0
    assert machine.message_seconds("all_reduce", 100, machine.inside, calls=2) == 3.0
    assert machine.message_seconds("shift", 100, machine.between) == 11.0


def test_a_small_group_takes_the_links_of_its_size() -> None:
    """Links are those of the smallest measured number that is no less; kinds not measured for it take those of the node."""
    few = {2: {"shift": Link(latency=0.0, rate=10.0)}, 4: {"shift": Link(latency=0.0, rate=20.0)}}
    whole = {kind: Link(latency=0.0, rate=50.0) for kind in ("shift", "all_reduce")}
    machine = replace(H200, inside=100.0, between=5.0, collectives=whole, small_groups=few)
    seconds = [machine.message_seconds("shift", 100, 100.0, ranks=ranks) for ranks in (0, 2, 3, 4, 8)]
    assert seconds == [2.0, 10.0, 5.0, 5.0, 2.0]
    assert machine.message_seconds("all_reduce", 100, 100.0, ranks=2) == 2.0
    assert machine.message_seconds("shift", 100, 5.0, ranks=2) == pytest.approx(20.0 + machine.latency)


@ranks(4)
def test_four_ranks_measure_pairs_too() -> None:
    with start() as process:
        mesh = Mesh({"rank": 4})
        found = _small_groups(4, mesh.group("rank"), process.device, TINY)
        assert set(found) == {2} and {"all_reduce", "send", "exchange_rows"} < set(found[2])
        mine = torch.tensor([link.seconds(4096.0) for link in found[2].values()], dtype=torch.float64)
        assert torch.equal(all_reduce(mine, mesh.group("rank")), 4 * mine)  # all ranks have the same
        assert len(found[2]["all_gather"].by_size) == len(TINY.message_bytes)
        mesh.close()


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_is_read_as_it_was_written(name: str, tmp_path: Path) -> None:
    reached = Efficiency(
        by_flop={"bf16": ((1e6, 0.5), (1e9, 1.0))},
        by_side={"bf16": ((256.0, 0.5), (1024.0, 0.9))},
        by_output={"bf16": ((65536.0, 0.3), (1048576.0, 0.7))},
        attention={64: 0.4, 128: 0.5},
        lag={64: 300.0, 128: 0.0},
        by_name={"aten.gelu": 0.8, "dropout.drop": 1.2},
        start=2e-6,
        hidden_by_kind={"all_gather": 0.5, "reduce_scatter": 0.0},
    )
    link = Link(latency=1e-5, rate=1e9, error=0.1, by_size=((1e3, 1e-5), (1e6, 1e-3)))
    host = replace(MACHINES[name].host, stepping=1e11, moments=2e11)
    machine = replace(MACHINES[name], efficiency=reached, collectives={"all_reduce": link}, host=host)
    machine = replace(machine, small_groups={2: {"all_reduce": link}, 4: {"shift": link}})
    file = tmp_path / "new" / "machine.json"
    write_machine(machine, file, {"what": "was measured"})
    assert find_machine(str(file)) == machine


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"meshfold_machine": 2}, "no 'meshfold_machine': 1"),
        ({"memroy": 1}, "unknown key 'memroy'. Did you mean 'memory'?"),
        ({"inside": 0}, "inside=0 must be a number above 0"),
        ({"latency": "fast"}, "latency='fast' must be a number"),
        ({"flops": {}}, "flops is empty"),
        ({"flops": {"bf16": -1}}, "flops: bf16=-1 must be"),
        ({"host": 3}, "host=3 must be an object"),
        ({"kind": "tpu"}, "kind='tpu' must be 'gpu' or 'cpu'"),
        ({"small_groups": {"two": {}}}, "small_groups={'two': {}} must map numbers of ranks"),
        ({"small_groups": {"2": {"shift": {"latency": 0}}}}, "small_groups: 2: shift: 'rate' is missing"),
        ({"collectives": {"shift": {"latency": 0}}}, "collectives: shift: 'rate' is missing"),
        ({"collectives": {"shift": {"latency": 0, "rate": 1, "by_size": [[1, 2], [2, 1]]}}}, "seconds that never fall"),
        ({"efficiency": {"by_flop": {"bf16": [[2, 0.5], [1, 1.0]]}}}, "by_flop must have its pairs by rising FLOP"),
        ({"efficiency": {"by_side": {"bf16": [[2, 0.5], [1, 1.0]]}}}, "by_side must have its pairs by rising side"),
        (
            {"efficiency": {"by_output": {"fp8": [[2, 0.5], [1, 1.0]]}}},
            "by_output must have its pairs by rising elements",
        ),
        ({"efficiency": {"lag": {"64": -1}}}, "lag=-1 must be a number above 0"),
        (
            {"efficiency": {"hidden_by_kind": {"all_gather": -1}}},
            "hidden_by_kind: all_gather=-1 must be a number above 0",
        ),
    ],
)
def test_a_wrong_file_says_what_to_change(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    write_machine(H200, file, {})
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(SpecError, match=said.replace(".", r"\.").replace("?", r"\?")):
        read_machine(file)


def test_a_missing_or_broken_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"No such file or directory\. meshfold calibrate --out"):
        find_machine(str(tmp_path / "none.json"))
    (tmp_path / "text.json").write_text("no JSON")
    with pytest.raises(SpecError, match=r"is not JSON .*write it with meshfold calibrate"):
        find_machine(str(tmp_path / "text.json"))


def test_what_matmuls_hide_of_gathers() -> None:
    assert hidden_of(2.0, 2.0, 2.0) == 1.0 and hidden_of(2.0, 2.0, 4.0) == 0.0
    assert hidden_of(1.0, 3.0, 3.5) == 0.5
    assert hidden_of(2.0, 2.0, 5.0) == 0.0 and hidden_of(2.0, 2.0, 1.9) == 1.0  # noise


def test_attention_with_few_and_many_keys() -> None:
    share, lag = share_and_lag({keys: 0.8 * keys / (keys + 200.0) for keys in (1024, 256)})
    assert (share, lag) == (pytest.approx(0.8), pytest.approx(200.0))
    reached = Efficiency(attention={64: share}, lag={64: lag})
    assert reached.of_attention(80, 200) == pytest.approx(0.4) and reached.of_attention(80) == pytest.approx(0.8)
    assert share_and_lag({256: 0.6, 1024: 0.5}) == (0.5, 0.0)  # noise
    assert share_and_lag({256: 0.1, 1024: 0.5}) == (0.5, 0.0)  # more than the keys explain
    assert share_and_lag({512: 0.5}) == (0.5, 0.0)


def test_what_plans_count_of_measured_operators() -> None:
    """Each by the name that plans know it by, on a GPU too; the rate that follows is that of its counted bytes."""
    on_cpu = operator_rates(torch.device("cpu"), TINY, torch.float32)
    assert {"aten.gelu_backward", "aten.sum", "aten.cat", "aten.masked_fill", "aten._softmax"} < set(on_cpu)
    assert {"aten.tanh", "aten.exp", "aten.silu", "aten.silu_backward"} < set(on_cpu)
    meta = torch.device("meta")
    on_gpu = [moved(work, "gpu") for work in calls_of(meta, "gpu", TINY, torch.bfloat16)]
    assert {"dropout.drop": 2 * 2 * 1024**2} in on_gpu  # reads and writes a tensor of 16 bits
    assert {"norms.whole", "norms.gradients"} < {name for counts in on_gpu for name in counts}
    assert all(rate > 0 for rate in on_cpu.values())
    counted = [moved(work, "cpu") for work in calls_of(meta, "cpu", TINY, torch.float32)]
    assert {"dropout.drop": 2 * 4 * 1024**2} in counted and "dropout.drop" in on_cpu  # numba's kernel
    assert not any(name.startswith("norms.") for counts in counted for name in counts)  # which has no norms


def test_narrow_products_are_measured_by_their_side() -> None:
    found = side_samples(1e30, torch.device("cpu"), TINY, torch.float32)
    assert set(found) == {16, 32} and all(0 < share < 1e-6 for share in found.values())
    assert set(side_samples(1e-9, torch.device("cpu"), TINY, torch.float32).values()) == {1.0}  # no more than the whole


def test_weight_gradients_are_measured_by_the_elements_of_their_result() -> None:
    found = output_samples(1e30, torch.device("cpu"), TINY, torch.float32)
    assert set(found) == {16**2, 24**2} and all(0 < share < 1e-6 for share in found.values())
    assert set(output_samples(1e-9, torch.device("cpu"), TINY, torch.float32).values()) == {
        1.0
    }  # no more than the whole


def test_the_pace_of_a_cpu_takes_its_changes_out_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work of three times the reference's operations, on a CPU that becomes twice as fast meanwhile."""
    now = [0.0]
    monkeypatch.setattr("meshfold.planner.calibration.timing.time.perf_counter", lambda: now[0])

    def run(operations: float) -> None:
        now[0] += operations / (1 + now[0] / 150)

    effort = replace(TINY, repeats=41)
    assert call_seconds(lambda: run(3.0), torch.device("cpu"), effort) < 2.5
    now[0] = 0.0
    pace = Pace(lambda: run(1.0), effort)
    assert pace.ratio(lambda: run(3.0)) == pytest.approx(3.0, rel=0.02) and now[0] > 140
    usual = pace.usual
    assert 0.5 < usual < 1.0
    begin = now[0]
    assert pace.ratio(lambda: run(1.0), least_s=100.0) == pytest.approx(1.0, rel=0.02)
    assert now[0] - begin >= 100.0 and pace.mark() < usual == pace.usual  # later marks do not change it
    assert pace_of(torch.device("cuda"), effort) is None


def test_all_matmuls_of_a_cpu_are_at_one_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples and layers are told by their ratios to the reference, and by its usual seconds."""
    cpu = torch.device("cpu")
    marks = iter([1.0, 3.0] * 1000)
    pace = Pace(lambda: None, TINY)
    monkeypatch.setattr(pace, "ratio", lambda work, least_s=0.0: 6.0)
    monkeypatch.setattr(pace, "mark", lambda: next(marks))
    pace.usual = 0.5
    found = matmul_samples(cpu, replace(TINY, longest_s=1e9), pace)
    assert {one.seconds for one in found} == {1.0} and {one.side for one in found} == set(TINY.sides)
    rates = layer_rates(found, pace, TINY)
    assert rates == {one.precision: pytest.approx(12 * 32 * 32 * (128 + 88) / 3.0) for one in found}
    monkeypatch.setattr(pace, "ratio", lambda work, least_s=0.0: 3.0)
    full = 12 * 32 * 32 * (128 + 88) / 1.5
    assert row_shares(full, pace, TINY, torch.float32) == pytest.approx({32: 1.0, 4: 1 / 8, 8: 1 / 4, 16: 1 / 2})
    assert set(row_shares(full / 100, pace, TINY, torch.float32).values()) == {1.0}  # no more than the whole
    shares = matmul_shares(found, rates)["fp32"]
    assert shares[0] == (2 * 16**3, pytest.approx(2 * 16**3 / rates["fp32"])) and all(share <= 1 for _, share in shares)


@ranks(2)
def test_a_cpus_collectives_are_timed_between_matmuls() -> None:
    """Matmuls are not counted; of the ranks' seconds the mean is the same number on both."""
    from meshfold.planner.calibration import messages

    with start() as process, pytest.MonkeyPatch.context() as patched:
        patched.setattr(messages, "three_matmuls", lambda *_: lambda: time.sleep(0.05))
        mesh = Mesh({"rank": 2})
        found = messages._seconds_between_matmuls(
            lambda: time.sleep(0.01 * (1 + process.rank)), mesh.group("rank"), process.device, replace(TINY, repeats=3)
        )
        assert 0.015 <= found < 0.04
        other = all_reduce(torch.tensor(found, dtype=torch.float64), mesh.group("rank"))
        assert float(other) == 2 * found
        mesh.close()


@pytest.mark.parametrize(("ranks_there", "wanted"), [(1, (90.0, 150.0)), (2, (90.0, 100.0)), (4, (50.0, 50.0))])
def test_few_ranks_do_not_reach_all_of_a_hosts_memory(ranks_there: int, wanted: tuple[float, float]) -> None:
    """A plan for one GPU took all that four ranks reach together, and was half as long as its step."""
    host = replace(H200.host, stepping=200.0, moments=200.0, stepping_of_one=90.0, moments_of_one=150.0)
    mesh = Mesh({"data": ranks_there}, rank=0)

    def found(of: Host) -> tuple[float, float]:
        share = replace(H200, host=of).rates("bf16", mesh=mesh, axes=("data",), ranks=ranks_there)
        return share.host_memory, share.moments_memory

    assert found(host) == wanted
    whole = 200.0 / ranks_there
    assert found(replace(host, stepping_of_one=0.0, moments_of_one=0.0)) == (whole, whole)


@ranks(2)
def test_a_hosts_memory_is_measured_by_all_ranks_and_by_one() -> None:
    from meshfold.planner.calibration import measure as module
    from meshfold.zero_gemini import machine_rates

    calls: list[None] = []

    def used(_: torch.device) -> machine_rates.HostInUse:
        calls.append(None)
        return machine_rates.HostInUse(parameters=50.0 * len(calls), moments=60.0 * len(calls))

    with start() as process, pytest.MonkeyPatch.context() as patched:
        rank, device = process.rank, torch.device("cpu")
        rates = H200.rates("bf16", mesh=Mesh({"data": 2}, rank=0), axes=("data",), ranks=2)
        rates = replace(rates, gpu_streaming=30.0 + rank, host_memory_while_streaming=20.0)
        patched.setattr(machine_rates, "measure_machine", lambda _, everyone: rates)
        patched.setattr(machine_rates, "measure_host_in_use", used)
        patched.setattr("os.sched_getaffinity", lambda _: {2 * rank, 2 * rank + 1, 7})
        mesh = Mesh({"rank": 2})
        notes: list[str] = []
        host = module._host(H200.host, mesh.group("rank"), device, replace(TINY, host=True), None, 2, notes)
        assert (host.stepping, host.moments) == (100.0, 120.0)
        assert (host.streaming, host.stepping_while_streaming) == (61.0, 40.0)
        assert (host.stepping_of_one, host.moments_of_one) == (100.0, 120.0)  # the first rank's second call
        assert len(calls) == 2 - rank
        assert host.cores == 5  # two of each rank, and one that both may use
        mesh.close()


@ranks(2)
def test_two_ranks_measure_one_machine() -> None:
    with start() as process:
        found = calibrate(process, TINY, name="two")
        machine = found.machine
        assert (machine.name, machine.kind, machine.devices, found.ranks) == ("two", "cpu", 2, 2)
        assert {"fp32", "bf16", "fp64", "fp16"} <= set(machine.flops)
        assert {sample.side for sample in found.matmuls} == set(TINY.sides)
        assert {"all_reduce", "send", "exchange_rows"} < set(machine.collectives)
        assert set(machine.efficiency.hidden_by_kind) == {"all_gather", "reduce_scatter", "all_reduce"}  # on a CPU too
        numbers = [
            machine.efficiency.hidden,
            machine.inside,
            machine.latency,
            machine.memory_rate,
            machine.flops["fp32"],
            machine.launches.forward,
        ]
        mine = torch.tensor(numbers, dtype=torch.float64)
        mesh = Mesh({"rank": 2})
        assert torch.equal(all_reduce(mine, mesh.group("rank")), 2 * mine)  # both ranks have the same
        mesh.close()
        table = calibration_table(found)
        assert "held-out error" in table and "disk: not measured (--disk FOLDER measures it)" in table


def test_operators_are_measured_in_the_usual_precision() -> None:
    """The quickest on a GPU, but for fp8; float32 on a CPU, though bfloat16 may be quicker there."""
    laptop = find_machine("laptop")
    assert replace(laptop, flops={"fp32": 2e11, "bf16": 4e11, "fp64": 1e11}).usual_precision == "fp32"
    assert replace(laptop, flops={"fp64": 1e11}).usual_precision == "fp64"
    assert replace(H200, flops={"fp8": 2e15, "bf16": 9e14, "fp32": 5e13}).usual_precision == "bf16"
