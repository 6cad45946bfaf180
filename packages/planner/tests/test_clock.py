"""The clock of plans: operators in seconds, by hand; one clock under every spec; what is counted as one kernel."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshfold.kernels import cross_entropy, linear_cross_entropy, rms_norm, swiglu
from meshfold.mesh import ParallelSpec
from meshfold.mesh.model_io import BACKWARD, DryRun, Operator
from meshfold.models import GPT, GPTConfig, Llama, LlamaConfig
from meshfold.planner import MACHINES, Estimate, Machine, estimate, step_speed, step_times
from meshfold.planner.clock import Phases, Work, operator_seconds, optimizer_seconds, update_seconds
from meshfold.planner.efficiency import IN_PLACE, Efficiency, Launches
from meshfold.planner.estimates import Times

H200 = MACHINES["h200x8"]
BIG = LlamaConfig(vocab_size=32_000, hidden=1024, layers=4, heads=8, ffn=2816, max_positions=1024)


ROWS = 128


def planned(parallel: dict[str, Any], ranks: int = 4, **settings: Any) -> Estimate:
    spec = ParallelSpec.parse(parallel, ranks)
    return estimate(lambda: Llama(BIG), spec, batch_size=ROWS, seq_len=1024, precision="bf16", machine=H200, **settings)


def test_an_operator_takes_the_longer_of_flop_and_bytes() -> None:
    flat = replace(H200, flops={"bf16": 1e12}, memory_rate=1e9, launches=Launches.of_all(0.0))
    matmuls = 0.86e12
    work = Work(
        operators={
            Operator(10**12): 2,
            Operator(10**3, bytes=10**9): 3,
            Operator(10**12, head_dim=128, computed=0.5): 1,
        }
    )
    assert work.seconds(flat, "bf16") == pytest.approx(
        2e12 / matmuls + 3 + 0.5e12 / (matmuls * Efficiency().of_attention(128))
    )
    assert work.seconds(replace(flat, launches=Launches.of_all(100.0)), "bf16") == 6 * 100.0  # the host needs longer
    assert work.flop == 2 * 10**12 + 3 * 10**3 + 10**12
    assert (work + work * 2).flop == 3 * work.flop
    share = Efficiency().of_attention
    assert share(64) < share(128) == share(256)
    assert optimizer_seconds(82, replace(H200, memory_rate=100.0)) == pytest.approx(1.0)


def test_a_cpu_launches_operators_and_runs_them_in_turn() -> None:
    """The same cores do both; a GPU runs what was launched before while the host launches more."""
    launches = Launches(forward=1.0, backward=2.0, kernel_forward=0.0, kernel_backward=0.0, parameter=0.5)
    gpu = replace(H200, memory_rate=1e9, launches=launches, efficiency=replace(H200.efficiency, elementwise=1.0))
    cpu = replace(gpu, kind="cpu")
    work = Work(operators={Operator(0, bytes=10**9): 3, Operator(0, bytes=10**9, phase=BACKWARD): 2})
    phases = work.phases(gpu, "bf16")
    assert (phases.device, phases.host, phases.seconds) == pytest.approx((5.0, 7.0, 7.0))
    phases = work.phases(cpu, "bf16")
    assert (phases.forward, phases.backward, phases.host, phases.idle) == pytest.approx((6.0, 6.0, 0.0, 0.0))
    update = optimizer_seconds(10**9, gpu)
    assert update_seconds(10**9, 4, gpu) == (update, 2.0) and update_seconds(10**9, 4, cpu) == (update + 2.0, 0.0)
    laptop = replace(MACHINES["laptop"], memory=1e12)
    slow, free = (replace(laptop, launches=Launches.of_all(each)) for each in (1e-3, 0.0))
    for parallel in ({}, {"data": 2, "zero": {"stage": 1}}, {"pipeline": {"size": 2, "microbatches": 2}}):
        spec = ParallelSpec.parse(parallel, 2 if parallel else 1)
        found = {
            machine.launches.forward: estimate(
                lambda: Llama(BIG), spec, batch_size=ROWS, seq_len=1024, precision="fp32", machine=machine
            )
            for machine in (slow, free)
        }
        least = sum(count * slow.launches.of(one) for one, count in found[0.0].work.operators.items())
        seconds = [step_speed(found[one.launches.forward], one, "fp32").seconds for one in (slow, free)]
        assert seconds[0] - seconds[1] >= 0.9 * least > 0.1, parallel
        assert (found[0.0].plan is not None) == ("zero" in parallel)
        times = step_times(found[1e-3], slow, "fp32")
        assert times.host == 0.0 and not times.waits_for_host


def test_narrow_products_few_keys_and_slow_names_take_longer() -> None:
    reached = replace(
        H200.efficiency,
        matmuls=1.0,
        by_side={"bf16": ((100, 0.5), (400, 1.0))},
        by_output={"bf16": ((1e4, 0.25), (1e6, 1.0))},
        attention={64: 0.5},
        lag={64: 300.0},
        by_name={"aten.gelu": 0.25},
    )
    flat = replace(H200, flops={"bf16": 1e12, "fp32": 1e11, "fp8": 1e13}, memory_rate=1e9, efficiency=reached)

    def took(operator: Operator, precision: str = "bf16") -> float:
        return operator_seconds(operator, flat, precision)

    assert [took(Operator(10**12, side=side)) for side in (0, 50, 200, 900)] == pytest.approx([1, 2, 4 / 3, 1])
    few = [Operator(10**12, side=side, outputs=count) for side, count in ((900, 10**4), (50, 10**5), (50, 10**7))]
    assert [took(one) for one in few] == pytest.approx([4, 2, 2])  # the slower of both
    assert took(Operator(10**12, side=50), "fp32") == pytest.approx(10)  # not measured
    assert took(Operator(10**12, side=50, fp8=True)) == pytest.approx(0.1)
    assert [took(Operator(10**12, head_dim=64, keys=keys)) for keys in (0, 300)] == pytest.approx([2, 4])
    assert took(Operator(10**12, head_dim=64, keys=300), "fp32") == pytest.approx(
        20 * 1.1
    )  # a query's begin is as quick
    assert [took(Operator(0, 10**9, name=name)) for name in ("aten.gelu", "aten.add")] == pytest.approx([4, 1])


def test_a_kernel_that_rewrites_logits_takes_its_reads_and_writes() -> None:
    """Its bytes count once; a machine that has measured it knows better."""
    head = torch.nn.Linear(8, 1000, bias=False, device="meta", dtype=torch.bfloat16)
    with DryRun() as run, Work.counted(run) as counter:
        linear_cross_entropy(
            torch.empty(64, 8, dtype=torch.bfloat16, device="meta", requires_grad=True),
            head.weight,
            torch.empty(64, dtype=torch.int64, device="meta"),
        ).backward()
    [kernel] = [one for one in counter.counts if one.name in IN_PLACE]
    assert kernel.bytes == pytest.approx(2 * 64 * 1000, rel=0.1)
    seconds = kernel.bytes / H200.memory_rate
    assert operator_seconds(kernel, H200, "bf16") == pytest.approx(seconds / 0.30 + H200.efficiency.start)
    measured = replace(H200, efficiency=replace(H200.efficiency, by_name={kernel.name: 0.5}))
    assert operator_seconds(kernel, measured, "bf16") == pytest.approx(2 * seconds + H200.efficiency.start)


def test_an_operator_without_matmuls_takes_its_start_too() -> None:
    late = replace(H200.efficiency, start=3e-6)
    slow = replace(H200, efficiency=late)
    small, matmul = Operator(0, bytes=1000, name="aten.add"), Operator(10**9, bytes=1000)
    message = Operator(0, bytes=0, name="_c10d_functional.wait_tensor")
    for operator, more in ((small, 3e-6), (matmul, 0.0), (message, 0.0)):
        seconds = [operator_seconds(operator, machine, "bf16") for machine in (H200, slow)]
        assert seconds[1] - seconds[0] == pytest.approx(more)
    for zero in ({}, {"zero": {"stage": 1}}):  # copies into chunks are operators
        found = planned({"data": 2, **zero}, 2)
        assert step_times(found, slow, "bf16").compute > step_times(found, H200, "bf16").compute


def test_what_is_hidden_depends_on_the_kind_and_on_the_link() -> None:
    """Inside a node shares are measured by kind, elsewhere a slower link hides more of its seconds."""
    reached = Efficiency(hidden=0.5, hidden_by_kind={"all_gather": 1.0, "reduce_scatter": 0.25})
    machine = replace(H200, efficiency=reached, inside=100.0, between=10.0)
    shown = [machine.shown_seconds(kind, 8.0, 100.0) for kind in ("all_gather", "reduce_scatter", "broadcast")]
    assert shown == [0.0, 6.0, 4.0]
    assert machine.shown_seconds("reduce_scatter", 8.0, 10.0) == pytest.approx(
        0.6
    )  # takes ten times as long for its bytes
    found = planned({"data": 4, "zero": {"stage": 3}})

    def hidden(devices: int = 8, **shares: float) -> float:
        machine = replace(H200, devices=devices, efficiency=Efficiency(hidden_by_kind=shares))
        return step_times(found, machine, "bf16").hidden

    none, sums, all_of_it = hidden(all_gather=0.0, reduce_scatter=0.0), hidden(all_gather=0.0), hidden()
    assert none == pytest.approx(0.0) and none < sums < all_of_it == 1.0
    assert hidden(1, all_gather=0.0, reduce_scatter=0.0) == pytest.approx(1.0 - H200.between / H200.inside)
    half = replace(H200, efficiency=Efficiency(hidden=0.5))
    assert step_times(planned({"data": 4}), half, "bf16").hidden == pytest.approx(0.5)


def test_operators_have_the_sides_and_names_that_are_measured() -> None:
    x, weight = torch.empty(64, 32, device="meta"), torch.empty(48, 32, device="meta")
    with DryRun() as run, Work.counted(run) as counter:
        torch.nn.functional.linear(x, weight, torch.empty(48, device="meta"))
        torch.bmm(x.expand(5, 64, 32), weight.t().expand(5, 32, 48))
        x.add_(1).add(1)
        rms_norm(x, torch.empty(32, device="meta"))
    products = [one for one in counter.counts if one.flop]
    assert [(one.side, one.outputs, one.name) for one in products] == [(32, 64 * 48, ""), (32, 5 * 64 * 48, "")]
    names = Counter(dict.fromkeys(("aten.add", "norms.whole"), 0))
    for operator, count in counter.counts.items():
        if operator.name in names:
            names[operator.name] += count
    assert names == {"aten.add": 2, "norms.whole": 1}


@pytest.mark.parametrize(("dtype", "on_gpu"), [(torch.float16, 0), (torch.bfloat16, 3 * 2)])
def test_a_gpu_widens_scores_inside_of_the_softmax(dtype: torch.dtype, on_gpu: int) -> None:
    """Of float16, not of bfloat16; a CPU widens both before it: a copy in float32 that is counted."""
    scores = torch.empty(8, 16, dtype=dtype, device="meta", requires_grad=True)
    found = {}
    for kind in ("gpu", "cpu"):
        with DryRun() as run, Work.counted(run, kind=kind) as counter:
            for softmax in (torch.softmax, torch.Tensor.softmax, torch.nn.functional.softmax):
                weights = softmax(scores, dim=-1, dtype=torch.float32)
                weights.backward(weights.detach())
                assert weights.dtype is torch.float32
        found[kind] = sum(count for one, count in counter.counts.items() if one.name == "aten._to_copy")
    assert found == {"gpu": on_gpu, "cpu": 3 * 2}
    assert scores.grad is not None and scores.grad.dtype is dtype


def test_products_that_are_added_in_place_are_counted() -> None:
    """SUMMA and rings add panel by panel; FLOP of both are those of the whole product."""
    a, b, y = (torch.empty(shape, device="meta") for shape in ((8, 16), (16, 4), (8, 4)))
    with DryRun() as run, Work.counted(run) as counter:
        y.addmm_(a, b)
        y.addmm_(a, b, beta=0)
        y.expand(3, 8, 4).clone().baddbmm_(a.expand(3, 8, 16), b.expand(3, 16, 4))
    assert counter.flop == 5 * 2 * 8 * 16 * 4


def test_a_kernel_counts_as_one_operator() -> None:
    x = torch.empty(64, 256, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(256, dtype=torch.bfloat16, device="meta")
    with DryRun() as run, Work.counted(run) as counter:
        rms_norm(x, weight)
        swiglu(x)
    sizes = sorted(operator.bytes for operator in counter.counts.elements())
    assert sizes == [64 * (256 + 128) * 2, pytest.approx(2 * 64 * 256 * 2 + 256 * 2 + 64 * 4, abs=256)]
    with DryRun() as run, Work.counted(run) as counter:  # no kernel for float64: its operators
        rms_norm(x.double(), weight.double())
    assert counter.counts.total() > 2


def test_a_loss_by_kernel_reads_its_logits_once() -> None:
    logits = torch.empty(128, 1000, dtype=torch.bfloat16, device="meta", requires_grad=True)
    labels = torch.empty(128, dtype=torch.int64, device="meta")
    with DryRun() as run, Work.counted(run) as counter:
        cross_entropy(logits, labels).sum().backward()
    moved = sum(operator.bytes * count for operator, count in counter.counts.items())
    assert moved < 6 * 128 * 1000 * 2


def test_attention_counts_the_pairs_that_it_computes() -> None:
    q = torch.empty(2, 8, 32, 16, device="meta")
    with DryRun() as run, Work.counted(run) as counter:
        for causal in (True, False):
            torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=causal)
    flop = 2 * 2 * (2 * 8 * 32 * 32 * 16)
    attention = {operator for operator in counter.counts if operator.head_dim}
    assert attention == {
        Operator(flop, head_dim=16, computed=share, keys=keys) for share, keys in ((0.5, 16), (1.0, 32))
    }


@pytest.mark.parametrize(
    "sequence", [dict(mode="ring", size=2), dict(mode="ulysses", size=2)], ids=lambda one: one["mode"]
)
def test_attention_over_ranks_computes_its_share_of_the_pairs(sequence: dict[str, Any]) -> None:
    whole, part = (
        sum(
            count * operator.flop * operator.computed
            for operator, count in found.work.operators.items()
            if operator.head_dim
        )
        for found in (planned({}, 1), planned(dict(sequence=sequence), 2))
    )
    assert part == pytest.approx(whole / 2, rel=0.01)


def test_a_step_takes_the_same_by_every_way_to_plan_it() -> None:
    """Without zero, with it and in stages it is the same work: the compute of each is that of the same operators."""
    plain = planned(dict(data=4))
    zero = planned(dict(data=4, zero=dict(stage=1, placement="cuda")))
    staged = planned(dict(data=2, pipeline=dict(size=2, microbatches=2)))
    seconds = [step_times(found, H200, "bf16").compute for found in (plain, zero)]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.05)
    assert staged.pipeline is not None
    both = sum(work.seconds(H200, "bf16") for stage in staged.pipeline.stages for work in stage.work)
    # Two micro-batches on two ranks, which multiply for input and weight apart.
    assert both == pytest.approx(seconds[0], rel=0.05)
    assert step_speed(zero, H200, "bf16").seconds == pytest.approx(step_speed(plain, H200, "bf16").seconds, rel=0.15)


def test_recomputation_costs_time_and_no_utilisation() -> None:
    plain, again = (planned(dict(data=4), recompute=how) for how in (None, "blocks"))
    assert again.work.flop - again.work.repeated_flop == plain.work.flop and plain.work.repeated_flop == 0
    fast, slow = (step_speed(found, H200, "bf16") for found in (plain, again))
    assert slow.seconds > fast.seconds and slow.mfu < fast.mfu
    assert fast.tokens_per_second == pytest.approx(ROWS * 1024 / fast.seconds)
    peak = 4 * 989e12
    assert fast.mfu == pytest.approx(4 * plain.flops / fast.seconds / peak)


WORK = st.lists(
    st.tuples(st.integers(0, 10**15), st.integers(0, 10**12), st.sampled_from([0, 64, 128]), st.integers(1, 50)),
    max_size=6,
)


def test_a_device_waits_for_the_hosts_launches() -> None:
    """Both begin together, and operators queue: what ends last is the device, the host, or a backward after a slow forward."""

    def seconds(forward: float, backward: float, ahead: float, behind: float, runs: int = 1) -> float:
        return Phases(
            forward=forward, backward=backward, launched_forward=ahead, launched_backward=behind, runs=runs
        ).seconds

    assert seconds(3, 5, 1, 1) == 8  # the host is always ahead
    assert seconds(1, 1, 3, 5) == 8  # the device always waits
    assert seconds(1, 5, 3, 1) == 8  # in the forward only: the backward begins late
    assert seconds(5, 1, 1, 3) == 6  # launches of the backward were queued during the forward
    assert seconds(2, 10, 6, 2, runs=2) == 14  # a second forward is launched during the first backward


def test_under_zero_a_device_waits_for_launches_before_it_steps() -> None:
    """A plan of zero has the device's seconds alone: waiting for the host in the forward comes before its backward and step."""
    small = replace(BIG, hidden=64, layers=2, heads=2, ffn=128, vocab_size=256, max_positions=32)
    slow = replace(H200, launches=replace(Launches.of_all(0.0), forward=1e-3))
    found = {
        accumulate: estimate(
            lambda: Llama(small),
            ParallelSpec.parse(dict(zero=dict(stage=1, placement="cuda")), 1),
            batch_size=2,
            seq_len=32,
            precision="bf16",
            machine=slow,
            accumulate=accumulate,
        )
        for accumulate in (1, 2)
    }
    plan, phases = found[1].plan, found[1].work.phases(slow, "bf16")
    assert plan is not None and phases.launched_forward > 10 * phases.device  # else nobody waits
    assert step_times(found[1], slow, "bf16").idle == pytest.approx(phases.launched_forward - phases.forward)
    wanted = plan.seconds + phases.launched_forward - phases.forward
    assert step_speed(found[1], slow, "bf16").seconds == pytest.approx(wanted, rel=1e-9)
    assert wanted > phases.seconds  # its step is no part of what the host hides
    # Hooks of each unit: two blocks, the embedding, the last norm and the head, in the forward of each micro-step.
    hooked = replace(slow, launches=replace(slow.launches, unit=1.0))
    for accumulate, one in found.items():
        more, less = (one.work.phases(machine, "bf16") for machine in (hooked, slow))
        assert more.launched_forward - less.launched_forward == pytest.approx(5.0 * accumulate)
        assert more.launched_backward == less.launched_backward


def test_launches_are_those_of_a_phase_and_of_our_kernels() -> None:
    host = Launches(forward=1.0, backward=2.0, kernel_forward=10.0, kernel_backward=20.0)
    on = replace(H200, launches=host)
    x = torch.empty(64, 256, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(256, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with DryRun() as run, Work.counted(run) as counter:
        y = rms_norm(x, weight) @ torch.empty(256, 8, dtype=torch.bfloat16, device="meta")
        y.backward(torch.empty_like(y))
    found = Work.of(counter).phases(on, "bf16")
    assert found.launched_forward == 10.0 + 1.0  # the kernel and the product
    others = sum(count for one, count in counter.counts.items() if one.phase == "backward" and not one.ours)
    assert others > 0 and found.launched_backward == 20.0 + 2.0 * others
    assert found.forward > 0 < found.backward


def test_what_compute_does_not_hide_of_data_traffic_is_on_the_clock() -> None:
    plain = Times(compute=5.0, tensor=1.0, data=4.0, optimizer=0.5)
    assert plain.overlapped == 6.5
    half = replace(plain, hidden=0.5)
    assert half.overlapped == 8.5 and replace(half, data=8.0).overlapped == 8.0 + 3.0 + 0.5
    assert replace(half, hidden=0.0).overlapped == half.apart
    on, free = (replace(H200, efficiency=replace(H200.efficiency, hidden=share)) for share in (0.25, 1.0))
    for spec in (dict(data=4), dict(data=4, zero=dict(stage=3, placement="cuda"))):
        found = planned(spec)
        exposed = 0.75 * step_times(found, on, "bf16").data  # compute takes longer
        difference = step_speed(found, on, "bf16").seconds - step_speed(found, free, "bf16").seconds
        assert difference == pytest.approx(exposed) and exposed > 0
    pushed = planned(dict(data=4, zero=dict(stage=3, placement="cuda", transport="push")))
    assert step_times(pushed, on, "bf16").exposed == 0.0  # by copy engines


def test_products_in_fp8_take_the_rate_of_fp8() -> None:
    """At rowwise scales the products of a layer's forward are in fp8; a machine without a rate for them takes bf16's."""
    spec = ParallelSpec.parse({}, 1)
    sizes = dict(batch_size=8, seq_len=1024, precision="bf16", machine=H200)
    plain, narrow = (estimate(lambda: Llama(BIG), spec, fp8=fp8, **sizes) for fp8 in (None, "rowwise"))  # type: ignore[arg-type]

    def products(found: Estimate, machine: Machine) -> float:
        chosen = {one: count for one, count in found.work.operators.items() if one.flop and not one.head_dim}
        return sum(
            Work(operators={replace(one, bytes=0): n}).phases(machine, "bf16").device for one, n in chosen.items()
        )

    assert sum(one.flop * n for one, n in narrow.work.operators.items() if one.fp8) > 0.5 * plain.flops
    assert not any(one.fp8 for one in plain.work.operators)
    assert products(narrow, H200) < 0.75 * products(plain, H200)
    without = replace(H200, flops={name: rate for name, rate in H200.flops.items() if name != "fp8"})
    assert products(narrow, without) == pytest.approx(products(plain, without), rel=0.02)


@given(WORK, st.floats(1.0, 100.0))
def test_a_faster_machine_is_never_slower(rows: list[tuple[int, int, int, int]], factor: float) -> None:
    work = Work(operators={Operator(flop, moved, head_dim): count for flop, moved, head_dim, count in rows})
    free = replace(H200, launches=Launches.of_all(0.0))
    before = work.seconds(free, "bf16")
    faster = replace(free, memory_rate=factor * H200.memory_rate)
    quicker = replace(faster, flops={"bf16": factor * H200.flops["bf16"]})
    assert work.seconds(quicker, "bf16") <= work.seconds(faster, "bf16") <= before
    assert work.seconds(quicker, "bf16") == pytest.approx(before / factor)


def test_a_model_of_gelus_too() -> None:
    config = GPTConfig(vocab_size=512, hidden=64, layers=2, heads=2, max_positions=64)
    found = estimate(
        lambda: GPT(config), ParallelSpec.parse({}, 1), batch_size=2, seq_len=64, precision="bf16", machine=H200
    )
    assert 0 < step_speed(found, H200, "bf16").mfu < 1


def test_messages_take_no_seconds_of_operators() -> None:
    """A gather, a scatter and an exchange move what their message moves; a sum and a broadcast copy their operand first."""
    found = planned({"tensor": 2, "sequence": {"mode": "megatron"}}, 2)
    bytes_of: Counter[str] = Counter()
    for operator, count in found.work.operators.items():
        if operator.name.startswith("_c10d_functional"):
            bytes_of[operator.name.removeprefix("_c10d_functional.")] += count * operator.bytes
    assert {name for name, moved in bytes_of.items() if not moved} == {
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "wait_tensor",
    }
    sums = sum(entry.calls for entry in found.traffic if entry.kind == "all_reduce")
    assert sums and bytes_of["all_reduce"] > 0
