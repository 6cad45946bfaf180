"""Bytes a rank holds and moves for a spec and a model, without a GPU and without any process.

  meshfold plan --model llama-8b --parallel "dict(data=8, tensor=dict(mode='2d', size=4))" \\
      --batch-size 64 --seq-len 4096 --precision bf16 --machine h200x8

The engine is built on meta tensors with simulated ranks and makes one step; the output shows what it would pass to
torch.distributed.

With zero=... it also says whether the model fits, where everything would live and what a step takes:

  meshfold plan --model gpt2-xl --parallel "dict(zero=dict(gpu_memory_limit='8GiB'))" --machine a100

For a folding model it answers for every number of residues and of GPUs, and chooses layout and chunks:

  meshfold plan --model folding:esmfold --residues 512,1024,2048,4096 --gpus 1,2,4,8 --gpu-memory 80GiB
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshfold.cli.arguments import (
    Failure,
    add_model,
    add_parallel,
    check_file,
    positive,
    read_changes,
    read_model,
    read_parallel,
    read_rules,
    reason_of,
)
from meshfold.cli.machine_options import add_machine_options, chosen_machine
from meshfold.cli.plan_folding import add_folding, is_folding, plan_folding_model
from meshfold.cli.train_arguments import FP8_NAMES, OPTIMIZER_NAMES, RECOMPUTE

if TYPE_CHECKING:
    from meshfold.mesh import ParallelSpec
    from meshfold.planner import AttentionChoice, Estimate, Machine, Times


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``meshfold plan``."""
    add_parallel(parser)
    parser.add_argument("--ranks", type=positive, metavar="N", help="world size (default: the product of the spec)")
    add_model(parser)
    parser.add_argument(
        "--batch-size", type=positive, metavar="N", help="sequences of a global batch (8), or proteins of a step (1)"
    )
    parser.add_argument(
        "--seq-len", type=positive, metavar="N", help="tokens of a sequence (default: the model's longest)"
    )
    parser.add_argument("--accumulate", type=positive, default=1, metavar="N", help="micro-steps of a step (1)")
    parser.add_argument("--precision", choices=("fp32", "fp64", "bf16", "fp16"), help="(bf16)")
    parser.add_argument("--fp8", choices=FP8_NAMES, help="say which linear layers this recipe has in fp8 (none)")
    parser.add_argument("--recompute", choices=("blocks", "but-attention", "auto"), help=RECOMPUTE)
    parser.add_argument("--no-clip", action="store_true", help="gradients are not clipped, and so none is held")
    parser.add_argument("--optimizer", default="adamw", choices=OPTIMIZER_NAMES, help="(adamw)")
    parser.add_argument(
        "--machine",
        metavar="NAME|FILE",
        help="h200, h100, a100, v100 with one GPU, h200x8, h100x8, a100x8, v100x8, laptop, or a file of meshfold calibrate "
        "(default: h200 or h200x8)",
    )
    add_machine_options(parser)
    parser.add_argument(
        "--timeline",
        metavar="FILE",
        help="draw what is on a device at every timestep under zero, or a schedule: .svg, .png",
    )
    parser.add_argument("--trace", metavar="FILE.json", help="the same for chrome://tracing")
    parser.add_argument("--report", action="store_true", help="also show how each submodule is split")
    parser.add_argument("--json", action="store_true", help="print JSON, bytes and seconds as plain numbers")
    add_folding(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run ``meshfold plan``."""
    if is_folding(arguments):
        return plan_folding_model(arguments)
    arguments.batch_size = arguments.batch_size or 8
    parallel = read_parallel(arguments.parallel)
    check_file("--timeline", arguments.timeline)
    check_file("--trace", arguments.trace)
    read_model(arguments)
    changes, rules = read_changes(arguments.changes), read_rules(arguments.rules)
    from meshfold.planner import choose_attention, estimate, explain_misfit, suggest_change
    from meshfold.train.model_choice import choose_model, longest

    spec = _spec_of(arguments, parallel)
    precision = arguments.precision or "bf16"
    machine = chosen_machine(arguments, arguments.machine or ("h200" if spec.world_size == 1 else "h200x8"))
    seq_len = arguments.seq_len or longest(arguments.model, arguments.hf, changes)
    model = choose_model(arguments.model, arguments.hf, changes, vocab_size=None, seq_len=seq_len)

    def estimated(spec: ParallelSpec, recompute: str | None, accumulate: int) -> Estimate:
        return estimate(
            model.build,
            spec,
            batch_size=arguments.batch_size,
            seq_len=seq_len,
            precision=precision,
            fp8=arguments.fp8,
            optimizer=arguments.optimizer,
            accumulate=accumulate,
            rules=rules,
            recompute=recompute,
            clip=not arguments.no_clip,
            machine=machine,
            name=model.name,
        )

    def alike(spec: ParallelSpec) -> Estimate:
        return estimated(spec, arguments.recompute, arguments.accumulate)

    found = alike(spec)
    attention = choose_attention(found, machine, precision, alike)
    reason = explain_misfit(found, machine)
    _write_pictures(found, arguments.timeline, arguments.trace)
    asked = _Asked(arguments, name=model.name, seq_len=seq_len, precision=precision, machine=machine)
    if arguments.json:
        _print_numbers(asked, found, attention)
    else:
        _print_tables(asked, found, attention, fits=not reason)
    if reason:
        rows = max(1, arguments.batch_size // arguments.accumulate // spec.axes["data"])
        change = suggest_change(found, machine, arguments.recompute, rows, estimated, accumulate=arguments.accumulate)
        raise Failure(f"it does not fit: {reason.removesuffix('.')}. {change}", code=1)
    return 0


@dataclass(frozen=True)
class _Asked:
    """The arguments of a plan, with the defaults that depend on the model and the spec."""

    arguments: argparse.Namespace
    name: str
    seq_len: int
    precision: str
    machine: Machine


def _spec_of(arguments: argparse.Namespace, parallel: Any) -> ParallelSpec:
    """Return the parsed spec.

    Raises:
        Failure: for pictures of a spec that has none.
    """
    from meshfold.mesh import ParallelSpec

    spec = ParallelSpec.parse(parallel, arguments.ranks)
    spec = spec.with_world_size(spec.world_size)  # data defaults to 1 without --ranks
    spec.require_installed()
    staged = spec.pipeline is not None and spec.pipeline.size > 1
    if spec.zero is None and not staged and (arguments.timeline or arguments.trace):
        raise Failure(
            "--timeline and --trace show where zero=... keeps things, or who does what when in a pipeline, and this spec "
            "has no zero and no pipeline"
        )
    return spec


def _print_numbers(asked: _Asked, found: Estimate, attention: AttentionChoice | None) -> None:
    """Print the plan as JSON."""
    from meshfold.planner import step_speed, step_times

    machine, precision = asked.machine, asked.precision
    answer = {
        "model": asked.name,
        "batch_size": asked.arguments.batch_size,
        "seq_len": asked.seq_len,
        "precision": precision,
        **_answer(found, step_times(found, machine, precision), machine),
        "speed": asdict(step_speed(found, machine, precision)),
    }
    if attention is not None:
        answer["attention"] = {"by_tokens": attention.by_tokens, "why": str(attention)}
    print(json.dumps(answer, indent=1, default=str))


def _print_tables(asked: _Asked, found: Estimate, attention: AttentionChoice | None, *, fits: bool) -> None:
    """Print the verdict in a line, tables of memory, traffic and time, and notes."""
    from meshfold.planner import step_speed, step_times
    from meshfold.planner.report import verdict_line

    arguments, machine, precision = asked.arguments, asked.machine, asked.precision
    print(f"{asked.name}, {arguments.batch_size} sequences of {asked.seq_len} tokens, {precision}")
    print(f"{verdict_line(found, step_speed(found, machine, precision), machine, fits=fits)}\n")
    _show(found, step_times(found, machine, precision), machine, report=arguments.report)
    if found.fp8:
        print(f"\n{found.fp8}\n{_fp8_times(found, machine, arguments.fp8)}")
    if attention is not None:
        print(f"\noverlap='auto': {attention}")
    _note_defaults(arguments, asked.seq_len)


def _note_defaults(arguments: argparse.Namespace, seq_len: int) -> None:
    """Print which defaults of ``meshfold train`` differ from those used here."""
    from meshfold.train.settings import TrainSettings

    ours = {"seq-len": (arguments.seq_len, seq_len), "precision": (arguments.precision, "bf16")}
    theirs = {"seq-len": TrainSettings.seq_len, "precision": TrainSettings.precision}
    other = {name: here for name, (typed, here) in ours.items() if typed is None and here != theirs[name]}
    if other:
        defaults = " ".join(f"--{name} {theirs[name]}" for name in other)
        same = " ".join(f"--{name} {here}" for name, here in other.items())
        print(f"\nmeshfold train takes {defaults} by default: type {same} there for this plan")


def _show(found: Estimate, took: Times, machine: Machine, *, report: bool) -> None:
    from meshfold.planner.report import memory_table, mesh_picture, time_table, traffic_table

    nodes = math.ceil(found.world_size / machine.devices)
    parts = [found.spec.describe()]
    if found.world_size > 1:
        parts.append(mesh_picture(found.spec.axes))
    if report and found.report:
        parts.append(found.report)
    pipeline = found.pipeline
    if pipeline is not None:
        from meshfold.planner.report import pipeline_time_table, rank_table, stage_table

        parts += [stage_table(pipeline), rank_table(pipeline)]
    parts += [memory_table(found), traffic_table(found)]
    if pipeline is not None:
        parts.append(pipeline_time_table(found, pipeline, took, machine, nodes))
        if found.plan is not None:
            parts.append(f"it fits; rank {pipeline.fullest} of the pipeline holds most\n{found.plan}")
    elif found.spec.zero is None:
        parts.append(time_table(found, took, machine, nodes))
    elif found.plan is not None:
        parts.append(f"it fits\n{found.plan}")
    print(*parts, sep="\n\n")


def _fp8_times(found: Estimate, machine: Machine, recipe: str) -> str:
    """Return in words at which rate products in fp8 are planned."""
    if "fp8" not in machine.flops or recipe.startswith("block") or found.pipeline is not None:
        return "times are those of bf16"
    return f"times: products in fp8 at {machine.flops['fp8'] / 1e12:,.4g} TFLOP/s, casts that are not compiled"


def _answer(found: Estimate, took: Times, machine: Machine) -> dict[str, Any]:
    """Return the plan as numbers for JSON."""
    from meshfold.planner import fits

    answer = {
        "parallel": found.spec.to_dict(),
        "axes": found.spec.axes,
        "world_size": found.world_size,
        "parameters": found.parameters,
        "local_parameters": found.local_parameters,
        "memory_bytes": {**asdict(found.memory), "total": found.memory.total},
        "traffic": [asdict(entry) for entry in found.traffic],
        "moved_bytes": found.moved,
        "flops": found.flops,
        "machine": machine.name,
        "fits": fits(found, machine),
        "seconds": {**asdict(took), "apart": took.apart, "overlapped": took.overlapped},
    }
    if found.fp8:
        answer["fp8"] = found.fp8.splitlines()
    if found.pipeline is not None:
        from meshfold.planner.report import pipeline_numbers

        answer["pipeline"] = pipeline_numbers(found.pipeline)
    if found.spec.zero is None:
        return answer
    plan = found.plan
    shown: dict[str, Any] = {"refusal": found.refusal}
    if plan is not None:
        shown = {
            "placement": plan.policy,
            "seconds": plan.seconds,
            "peak_gpu_bytes": plan.peak_gpu_bytes,
            "peak_host_bytes": plan.peak_host_bytes,
            "peak_disk_bytes": plan.peak_disk_bytes,
            "limits": asdict(plan.limits),
            "layers": [asdict(layer) for layer in plan.layers],
            "terms": [asdict(term) for term in plan.terms],
            "chunks": [
                {**asdict(made), "elements": chunk.elems}
                for made, chunk in zip(plan.chunks, plan.workload.chunks, strict=True)
            ],
        }
    return {**answer, "zero": shown}


def _write_pictures(found: Estimate, timeline: str | None, trace: str | None) -> None:
    """Write pictures: of a pipeline's schedule, or under zero of a device's contents at every timestep."""
    from meshfold.pipeline import draw as draw_schedule
    from meshfold.planner.report import schedule_trace
    from meshfold.zero_gemini.planner import chrome_trace, draw

    try:
        if found.pipeline is not None:
            simulation = found.pipeline.simulation
            if timeline is not None:
                draw_schedule(simulation, timeline)
            if trace is not None:
                Path(trace).write_text(json.dumps(schedule_trace(simulation)))
        elif found.plan is not None:
            if timeline is not None:
                draw(found.plan, timeline)
            if trace is not None:
                Path(trace).write_text(json.dumps(chrome_trace(found.plan)))
    except OSError as error:
        raise Failure(reason_of(error)) from error
