"""Bytes a rank holds and moves for a spec and a model, without a GPU and without any process.

  meshfold plan --model llama-8b --parallel "dict(data=8, tensor=dict(mode='2d', size=4))" \\
      --batch-size 64 --seq-len 4096 --precision bf16 --machine h200x8

The engine is set up on tensors without values, in a world of ranks that are not there, and makes one step; what is
printed is what it would hand to torch.distributed.
"""

from __future__ import annotations

import argparse
import json
import math

from meshfold.engine.cli.models import add_model, positive, read_changes
from meshfold.engine.cli.parallel import add_parallel, read_parallel


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``meshfold plan``."""
    add_parallel(parser)
    parser.add_argument(
        "--ranks", type=positive, metavar="N", help="world size (default: the product of the spec)"
    )
    add_model(parser)
    parser.add_argument(
        "--batch-size", type=positive, default=8, metavar="N", help="sequences of a global batch (8)"
    )
    parser.add_argument(
        "--seq-len", type=positive, metavar="N", help="tokens of a sequence (default: the model's longest)"
    )
    parser.add_argument(
        "--accumulate", type=positive, default=1, metavar="N", help="micro-steps of a step (1)"
    )
    parser.add_argument(
        "--precision", default="bf16", choices=("fp32", "fp64", "bf16", "fp16"), help="(bf16)"
    )
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "adam", "sgd"), help="(adamw)")
    parser.add_argument(
        "--machine",
        default="h200x8",
        metavar="NAME",
        help="for the time: h200x8, h100x8, a100x8, v100x8, laptop (default: h200x8)",
    )
    parser.add_argument("--report", action="store_true", help="also show what becomes of each submodule")
    parser.add_argument("--json", action="store_true", help="print JSON, bytes and seconds as plain numbers")


def run(arguments: argparse.Namespace) -> int:
    """Run ``meshfold plan``."""
    parallel = read_parallel(arguments.parallel)
    changes = read_changes(arguments.changes)
    from dataclasses import asdict

    from meshfold.engine.machines import machine as find_machine
    from meshfold.engine.model_choice import choose_model, longest
    from meshfold.engine.plan_text import memory_table, picture, time_table, traffic_table
    from meshfold.engine.planner import estimate, times
    from meshfold.mesh import ParallelSpec

    machine = find_machine(arguments.machine)
    spec = ParallelSpec.parse(parallel, arguments.ranks)
    spec = spec.with_world_size(spec.world_size)  # data is 1 where neither it nor --ranks was given
    spec.require_installed()
    seq_len = arguments.seq_len or longest(arguments.model, arguments.hf, changes)
    model = choose_model(arguments.model, arguments.hf, changes, vocab_size=None, seq_len=seq_len)
    found = estimate(
        model.build,
        spec,
        batch_size=arguments.batch_size,
        seq_len=seq_len,
        precision=arguments.precision,
        optimizer=arguments.optimizer,
        accumulate=arguments.accumulate,
    )
    took = times(found, machine, arguments.precision)
    nodes = math.ceil(found.world_size / machine.devices)
    if arguments.json:
        answer = {
            "model": model.name,
            "parallel": spec.to_dict(),
            "axes": spec.axes,
            "world_size": found.world_size,
            "batch_size": arguments.batch_size,
            "seq_len": seq_len,
            "precision": arguments.precision,
            "parameters": found.parameters,
            "local_parameters": found.local_parameters,
            "memory_bytes": {**asdict(found.memory), "total": found.memory.total},
            "traffic": [asdict(entry) for entry in found.traffic],
            "moved_bytes": found.moved,
            "flops": found.flops,
            "machine": machine.name,
            "seconds": {**asdict(took), "apart": took.apart, "overlapped": took.overlapped},
        }
        print(json.dumps(answer, indent=1, default=str))
        return 0
    print(f"{model.name}, {arguments.batch_size} sequences of {seq_len} tokens, {arguments.precision}\n")
    print(spec.describe(), picture(spec.axes), sep="\n\n", end="\n\n")
    if arguments.report and found.report:
        print(found.report, end="\n\n")
    print(memory_table(found), traffic_table(found), time_table(found, took, machine, nodes), sep="\n\n")
    return 0
