"""Calibration: fits of made-up samples, machines as files, and a tiny measurement on two ranks."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshfold.kernels.fuse import fuse
from meshfold.mesh import Mesh, SpecError, all_reduce, start
from meshfold.mesh.model_io import DryRun, Operator
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
    read_machine,
    seconds_by_size,
    typical_link,
    write_machine,
)
from meshfold.planner.calibration.fits import share_and_lag
from meshfold.planner.calibration.launches import (
    Counts,
    HostSeconds,
    _Model,
    counted,
    launches_of,
    measure_launches,
    with_experts,
    with_sums,
)
from meshfold.planner.calibration.measure import _small_groups
from meshfold.planner.calibration.messages import hidden_of
from meshfold.planner.calibration.operators import calls_of, moved, operator_rates
from meshfold.planner.calibration.samples import output_samples, side_samples
from meshfold.planner.clock import Work
from meshfold.planner.efficiency import Efficiency, Launches, Link

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
    shares = [share for _, share in matmul_shares(samples)["bf16"]]
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
    meta = torch.device("meta")
    on_gpu = [moved(work, "gpu") for work in calls_of(meta, "gpu", TINY, torch.bfloat16)]
    assert {"dropout.drop": 2 * 2 * 1024**2} in on_gpu  # reads and writes a tensor of 16 bits
    assert {"norms.whole", "norms.gradients"} < {name for counts in on_gpu for name in counts}
    assert "dropout.drop" not in on_cpu and all(rate > 0 for rate in on_cpu.values())


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


def test_launches_explain_the_seconds_that_a_model_took() -> None:
    known = Launches(forward=2.0, backward=1.0, kernel_forward=5.0, kernel_backward=7.0, parameter=3.0)
    without = Counts(forward=10, backward=30, kernels_forward=0, kernels_backward=0, parameters=4)
    fused = Counts(forward=8, backward=26, kernels_forward=2, kernels_backward=3, parameters=4)

    def took(counts: Counts) -> HostSeconds:
        return HostSeconds(
            forward=2.0 * counts.forward + 5.0 * counts.kernels_forward,
            backward=1.0 * counts.backward + 7.0 * counts.kernels_backward,
            update=3.0 * counts.parameters,
        )

    assert launches_of(took(without), took(fused), without, fused) == known
    # Where no kernel runs, one takes as long as any operator; and noise makes no launch free.
    assert launches_of(took(without), took(without), without, without).kernel_backward == 1.0
    quick = replace(took(fused), forward=0.0)
    assert launches_of(took(without), quick, without, fused).kernel_forward == 1.0


def test_sums_that_wait_take_what_norms_alone_do_not() -> None:
    """Kernels were charged for the Python of the sums that half of the norms compute."""
    known = Launches(forward=2.0, backward=1.0, kernel_forward=5.0, kernel_backward=7.0, parameter=3.0)
    counts = Counts(forward=8, backward=20, kernels_forward=4, kernels_backward=4, parameters=4, sums=2)
    found = with_sums(known, HostSeconds(forward=16.0 + 20.0 + 6.0, backward=0.0, update=0.0), counts)
    assert found == replace(known, residual=3.0)
    assert with_sums(known, HostSeconds(forward=1.0, backward=0.0, update=0.0), counts) == known  # noise
    assert with_sums(known, HostSeconds(forward=99.0, backward=0.0, update=0.0), replace(counts, sums=0)) == known
    # Experts of a model whose norms compute sums are not charged for these.
    both = replace(counts, backward=0, kernels_backward=0)
    took = HostSeconds(forward=16.0 + 20.0 + 6.0 + 8.0, backward=0.0, update=0.0)
    assert with_experts(found, took, both, layers=2).experts_forward == 4.0


def test_a_norm_that_computes_a_sum_is_charged_for_it() -> None:
    slow = replace(H200, launches=Launches(**{**dict.fromkeys(vars(Launches()), 0.0), "residual": 2.0}))
    for rules, sums in ((dict(residual=False), 0), (dict(), 3)):
        with torch.device("meta"):
            model, ids = _Model(3, norms=True, experts=False).bfloat16(), torch.empty(1, 8, dtype=torch.int64)
        fuse(model, **rules)
        with DryRun() as run, Work.counted(run) as counter:
            model(ids, ids)["loss"].backward()
        phases = Work.of(counter).phases(slow, "bf16")
        assert (phases.launched_forward, phases.launched_backward) == (2.0 * sums, 0.0)  # the forward's Python


@ranks(2)
def test_a_model_takes_as_long_as_on_its_slowest_rank_before_its_seconds_are_divided() -> None:
    """The most of the ranks' differences was larger than any rank's: here 9 for a kernel."""
    from meshfold.planner.calibration import launches as module

    counts = Counts(forward=10, backward=10, kernels_forward=0, kernels_backward=0, parameters=1)
    fused = replace(counts, kernels_forward=10, kernels_backward=10)
    with start() as process, pytest.MonkeyPatch.context() as patched:
        plain, norms = ((20.0, 80.0), (10.0, 100.0))[process.rank]

        def took(_: Any, __: Any, kind: Any) -> HostSeconds:
            return (
                HostSeconds(forward=norms, backward=norms, update=1.0)
                if kind.norms
                else HostSeconds(forward=plain, backward=plain, update=1.0)
            )

        patched.setattr(module, "_measured", took)
        patched.setattr(module, "_counted_kind", lambda _, __, kind: fused if kind.norms else counts)
        mesh = Mesh({"rank": 2})
        found = measure_launches(process, TINY, mesh.group("rank"))
        assert (found.forward, found.kernel_forward, found.kernel_backward) == (2.0, 8.0, 8.0)
        mesh.close()


def test_layers_of_experts_take_what_their_operators_do_not_explain() -> None:
    known = Launches(forward=2.0, backward=1.0, kernel_forward=5.0, kernel_backward=7.0, parameter=3.0)
    counts = Counts(forward=10, backward=20, kernels_forward=3, kernels_backward=2, parameters=4)
    took = HostSeconds(forward=20.0 + 15.0 + 8.0, backward=20.0 + 14.0 + 6.0, update=0.0)
    found = with_experts(known, took, counts, layers=2)
    assert (found.experts_forward, found.experts_backward) == (4.0, 3.0)
    assert replace(found, experts_forward=0.0, experts_backward=0.0) == known
    quick = with_experts(known, replace(took, forward=1.0), counts, layers=2)
    assert quick.experts_forward == 0.0  # noise makes no layer faster than its operators


def test_a_model_of_experts_is_charged_for_its_layers() -> None:
    """Once in a forward and once in a backward; a forward that recomputation runs again has no backward of its own."""
    slow = replace(H200, launches=Launches(**{**dict.fromkeys(vars(Launches()), 0.0), "experts_forward": 2.0}))
    both = replace(slow, launches=replace(slow.launches, experts_backward=3.0))
    places = {
        phase: Operator(0, bytes=8, phase=phase, ours=True, name="expert_places.placed")
        for phase in ("forward", "repeated")
    }
    work = Work(operators={places["forward"]: 4, places["repeated"]: 4, Operator(0, bytes=8, name="aten.add"): 9})
    phases = work.phases(both, "bf16")
    assert (phases.launched_forward, phases.launched_backward) == (8.0, 8.0 + 12.0)
    for experts, layers in ((False, 0), (True, 2)):
        with torch.device("meta"):
            model = _Model(2, norms=False, experts=experts)
            ids = torch.empty(1, 8, dtype=torch.int64)
        with DryRun() as run, Work.counted(run) as counter:
            model.bfloat16()(ids, ids)["loss"].backward()
        assert Work.of(counter).phases(slow, "bf16").host == pytest.approx(2.0 * layers)
        # A GPU multiplies the rows of all experts in one launch, without filling the result before.
        assert not layers or not any(one.name == "aten.new_zeros" for one in counter.counts)


def test_the_model_that_measures_launches_has_kernels_on_a_gpu_only() -> None:
    plain, fused = (counted(2, "cuda", norms=norms) for norms in (False, True))
    cpu = counted(2, "cpu", norms=True)
    assert plain.kernels_forward == plain.kernels_backward == cpu.kernels_forward == 0
    assert fused.kernels_forward == fused.kernels_backward == 4  # two norms of each layer
    assert fused.forward <= plain.forward  # sums go into the norms
    assert plain.parameters == fused.parameters - 2 * 4 == 2 * 8 + 3


def test_a_file_with_one_number_for_all_launches_is_read(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    write_machine(H200, file, {})
    assert find_machine(str(file)).launches == H200.launches
    found = json.loads(file.read_text())
    del found["launches"]
    file.write_text(json.dumps(found | {"launch": 1e-6}))
    assert find_machine(str(file)).launches == Launches.of_all(1e-6)


@ranks(2)
def test_two_ranks_measure_one_machine() -> None:
    with start() as process:
        found = calibrate(process, TINY, name="two")
        machine = found.machine
        assert (machine.name, machine.kind, machine.devices, found.ranks) == ("two", "cpu", 2, 2)
        assert {"fp32", "bf16", "fp64", "fp16"} <= set(machine.flops)
        assert {sample.side for sample in found.matmuls} == set(TINY.sides)
        assert {"all_reduce", "send", "exchange_rows"} < set(machine.collectives)
        numbers = [
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
