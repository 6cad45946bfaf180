"""32 Llama-8B-shaped layers on four ranks under every pipeline schedule, side by side with torch's pipelining.

Forward and backward of a whole step; all contestants hold the same weights in stages of equal size, run in one process
group, and are timed in interleaved rounds, from a barrier to the end of the slowest rank. Beside the times: the bubble as
events around every action show it, and as the simulator foretells it from costs measured before. `meshfold bench
pipeline --ranks 4` writes JSON with the raw times, to which other numbers of micro-batches are added; `--report FILE.json`
makes the table, the bars and the plot from it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own

import torch

from benchmarks.common import (
    Contestant,
    add_output,
    add_windows,
    agree,
    check_out,
    energy_windows,
    machine,
    milliseconds,
    parse_with_tiny,
    synchronize,
    write,
)

TINY = dict(
    layers=16,
    hidden=64,
    heads=4,
    kv_heads=2,
    ffn=96,
    vocab=64,
    seq_len=32,
    dtype="float32",
    microbatches=[4, 8],
    rounds=2,
    warm_up=1,
)


def main(argv: Sequence[str]) -> int:
    """Entry point of `meshfold bench pipeline`."""
    parser = argparse.ArgumentParser(prog="meshfold bench pipeline", description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4, help="local ranks, one a GPU where there are as many")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--ffn", type=int, default=14336)
    parser.add_argument("--vocab", type=int, default=1024, help="small: so that stages weigh alike")
    parser.add_argument("--rows", type=int, default=1, help="sequences a micro-batch")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens a sequence")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2, help="steps of each contestant that do not count")
    parser.add_argument("--only", default="", help="comma-separated names of contestants")
    parser.add_argument("--compiled", action="store_true", help="with compiled blocks too, in rows of their own")
    parser.add_argument("--batched-weights", action="store_true", help="weight gradients due at once as one product")
    parser.add_argument(
        "--auto-memory",
        type=float,
        default=8.0,
        help="most activations that `auto` may hold, in micro-batches of a rank's share of the model",
    )
    parser.add_argument("--list", action="store_true", help="the contestants")
    add_windows(parser)
    add_output(parser, "pipeline")
    args = parse_with_tiny(parser, argv, TINY)
    if args.report:
        from benchmarks.pipeline.report import report

        return report(args.report)
    if args.list:
        from benchmarks.pipeline.contestants import COMPILED, NAMES

        print("\n".join((*NAMES, *(f"{name} compiled" for name in COMPILED))))
        return 0
    if "RANK" not in os.environ:
        _names(args)
        check_out(args.out)
        from meshfold.mesh.processes import launch

        # Each contestant has streams of its own for what it sends. Streams that share one of the GPU's queues wait for
        # each other, and a kernel that waits for a message must hold up none that the sender waits for: take all queues.
        queues = {"CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "32")}
        return launch([str(Path(__file__).resolve()), *argv], args.ranks, env=queues)
    return _measure(args)


def _measure(args: argparse.Namespace) -> int:
    from benchmarks.pipeline.contestants import Runner
    from benchmarks.pipeline.work import Work
    from meshfold.engine.zero.process_settings import grow_segments
    from meshfold.mesh import Mesh
    from meshfold.mesh.processes import process_group

    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    if args.compiled:
        from torch._dynamo import config as compiling

        compiling.recompile_limit = 128  # each contestant compiles the same blocks anew
    world = process_group.start(timeout=180)
    segments = grow_segments(world.device)  # many contestants live side by side: leave no gaps between them
    work = Work(args, Mesh({"pipe": args.ranks}), world.device)
    say = print if world.rank == 0 else _silent
    runners: list[Runner] = []
    send = _send_milliseconds(work)
    say(f"a message of a micro-batch takes {send:.3f} ms", flush=True)
    costs: dict[int, Any] = {}
    for name in _names(args):
        begin = time.monotonic()
        runners.append(_built(name, work, costs))
        made = runners[-1]
        if made.pipeline is not None:
            found = _costs(made, work, send)
            if name in ("1f1b", "zb-v"):  # the cuts that `auto` may choose between
                costs[1 if name == "1f1b" else 2] = found
        say(f"{name:<28} {made.note or 'built'} after {time.monotonic() - begin:.1f} s", flush=True)
    result = _opened(args)
    result |= {
        "send_milliseconds": send,
        "costs": {runner.name: runner.costs for runner in runners if runner.costs},
    }

    def save() -> None:  # whenever there is more: a contestant that hangs takes the rest with it
        result["notes"] = {runner.name: runner.note for runner in runners if runner.note}
        if world.rank == 0:
            write(args.out, result)

    for microbatches in args.microbatches:
        case: dict[str, Any] = {
            "milliseconds": {},
            "peak_bytes": {},
            "loss": {},
            "norm_error": {},
            "bubbles": {},
            "actions": {},
            "flops_per_rank": work.flops(microbatches) / args.ranks,
        }
        result["cases"][str(microbatches)] = case
        _fill(case, runners, work, microbatches, send, say, save)
        save()
    if world.rank == 0:
        from benchmarks.pipeline.report import described

        print(described(result))
        print(f"written to {args.out}")
    world.close()
    segments.close()
    return 0


_NOT_SETTINGS = ("out", "report", "list", "microbatches", "rounds", "window_s", "settle_s")


def _opened(args: argparse.Namespace) -> dict[str, Any]:
    """The result to add cases to: what is there if it was measured with the same settings on such a machine, else a new one."""
    settings = {name: value for name, value in vars(args).items() if name not in _NOT_SETTINGS}
    fresh: dict[str, Any] = {"area": "pipeline", "machine": machine(), "settings": settings, "cases": {}}
    if not args.out.exists():
        return fresh
    known: dict[str, Any] = json.loads(args.out.read_text())
    same = known["settings"] == settings and known["machine"] == fresh["machine"]
    return known if same else fresh


def _silent(*words: object, **options: object) -> None:
    """Said by rank 0 alone."""


def _names(args: argparse.Namespace) -> list[str]:
    """Contestants in the order in which they are built: `auto` after those whose costs it searches with."""
    from benchmarks.pipeline.contestants import COMPILED, NAMES

    names = [*NAMES, *(f"{name} compiled" for name in COMPILED if args.compiled)]
    chosen = [part.strip() for part in args.only.split(",") if part.strip()]
    known = {*NAMES, *(f"{name} compiled" for name in COMPILED)}
    for name in chosen:
        if name not in known:
            raise SystemExit(f"there is no contestant {name!r}; there are: {', '.join(sorted(known))}")
    if not chosen:
        return names
    needed = {"1f1b", "zb-v"} if "auto" in chosen else set()
    return [name for name in (*NAMES, *(f"{name} compiled" for name in COMPILED)) if name in {*chosen, *needed}]


def _built(name: str, work: Any, costs: dict[int, Any]) -> Any:
    from benchmarks.pipeline.contestants import Runner, build

    made, reason = None, ""
    try:
        made = build(name, work, costs)
    except Exception as error:  # a contestant that cannot run is a row with its reason
        reason = _reason(error)
    if _failed_somewhere(work, made is None) or made is None:
        return Runner(name, note=f"could not be built: {reason or 'on another rank'}")
    return made


def _failed_somewhere(work: Any, here: bool) -> bool:
    """Whether any rank failed: all must leave a contestant out together. All ranks call."""
    from meshfold.mesh import all_reduce

    told = torch.tensor(float(here), dtype=torch.float64, device=work.device)
    return float(all_reduce(told, work.mesh.group("pipe"), "max")) > 0


def _reason(error: Exception) -> str:
    said = str(error).strip().splitlines() or [""]
    cause = error.__cause__
    behind = f" ({type(cause).__name__}: {str(cause).splitlines()[0][:200]})" if cause and str(cause) else ""
    return f"{type(error).__name__}: {said[0][:200]}{behind}"


def _costs(runner: Any, work: Any, send: float) -> Any:
    """Milliseconds of F, B and W of every stage by itself, kept with the contestant; what `auto` takes."""
    from meshfold.pipeline import Costs

    pipeline = runner.pipeline
    ids = work.batch(1)
    batch = dict(input_ids=ids, labels=ids)
    pipeline.measure(batch, repeats=1)  # the first of a shape compiles and fills caches
    found = pipeline.measure(batch)
    lists = {op: [1e3 * value for value in getattr(found, op)] for op in _OPS}
    runner.costs = lists
    return Costs(**lists, send=send, activation=1 / pipeline.program(4).schedule.chunks)


_OPS = ("forward", "backward_input", "backward_weight")


def _send_milliseconds(work: Any) -> float:
    """How long a micro-batch's activations are on their way to the next rank, from a ball played between two."""
    from meshfold.mesh import all_reduce
    from meshfold.pipeline.runtime.executor import Channels

    channels = Channels(work.mesh, "pipe")
    args, times, here = work.args, 10, work.mesh.index("pipe")
    ball = torch.zeros(args.rows * args.seq_len, args.hidden, dtype=work.dtype, device=work.device)

    def play() -> None:
        if here == 0:
            channels.send(ball, 1)
            channels.receive(torch.empty_like(ball), 1).wait()
        elif here == 1:
            channels.receive(torch.empty_like(ball), 0).wait()
            channels.send(ball, 0)
            channels.finish()
        channels.finish()

    found = 0.0
    if args.ranks > 1:
        play()
        synchronize()
        found = milliseconds(play, times) / 2
    table = torch.tensor(found if here == 0 else 0.0, dtype=torch.float64, device=work.device)
    return float(all_reduce(table, work.mesh.group("pipe")))


def _fill(
    case: dict[str, Any],
    runners: list[Any],
    work: Any,
    microbatches: int,
    send: float,
    say: Any,
    save: Callable[[], None],
) -> None:
    """All contestants with so many micro-batches: checked, then timed in rounds, then watched."""
    from benchmarks.pipeline.timeline import watch
    from meshfold.mesh import all_reduce, barrier

    group, device = work.mesh.group("pipe"), work.device
    steps: dict[str, Any] = {}
    reference: list[float] | None = None
    for runner in runners:
        if runner.start is None:
            continue
        begin = time.monotonic()
        tried, reason = None, ""
        try:
            tried = _first_steps(runner, work, microbatches)
        except Exception as error:
            reason = _reason(error)
        if _failed_somewhere(work, tried is None) or tried is None:
            runner.note, runner.start = f"could not run: {reason or 'on another rank'}", None
            tried = None
            _clear(runner)
            if work.device.type == "cuda":
                torch.cuda.empty_cache()
            say(f"m={microbatches} {runner.name:<28} {runner.note}", flush=True)
            continue
        step = tried[0]
        loss, peak, norms = _found(runner, work, *tried[1:])
        reference = norms if reference is None else reference
        steps[runner.name] = step
        case["loss"][runner.name] = loss
        case["norm_error"][runner.name] = _distance(norms, reference)
        case["peak_bytes"][runner.name] = peak
        seconds = time.monotonic() - begin
        say(
            f"m={microbatches} {runner.name:<28} loss {loss:.4f}  gradient norms off by {case['norm_error'][runner.name]:.1e}  "
            f"peak {peak / 2**30:.2f} GiB  {seconds:.1f} s",
            flush=True,
        )

    by_name = {runner.name: runner for runner in runners}
    for _ in range(work.args.rounds):
        for name, step in steps.items():
            barrier(group, device)
            took = torch.tensor(milliseconds(step, 1), dtype=torch.float64, device=device)
            _clear(by_name[name])
            case["milliseconds"].setdefault(name, []).append(float(all_reduce(took, group, "max")))
        save()
    case["power"] = energy_windows(  # joules take longer than times: clocks have to settle
        [Contestant(name, partial(_clean_step, by_name[name], step)) for name, step in steps.items()],
        ranks=work.args.ranks,
        window_s=work.args.window_s,
        settle_s=work.args.settle_s,
        between=lambda: barrier(group, device),
        agreed=agree(device),
        gpus=work.args.ranks if work.mesh.rank == 0 else 0,
    )
    for runner in runners:
        _clear(runner)
    save()
    for name, step in steps.items():
        pipeline = by_name[name].pipeline
        if pipeline is None:
            continue
        lines = []
        for _ in range(3):
            lines.append(watch(pipeline, step, microbatches))
            _clear(by_name[name])
        case["bubbles"][name] = _bubbles(lines, by_name[name].costs, pipeline, microbatches, send)
        case["actions"][name] = sorted(lines, key=lambda line: line.makespan)[1].ranks
        save()


def _first_steps(runner: Any, work: Any, microbatches: int) -> tuple[Any, Any, int]:
    """First steps of a contestant: its step, the loss where it is known, its peak on this rank."""
    step, device = runner.start(microbatches), work.device
    synchronize()
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    loss: Any = None
    for _ in range(max(work.args.warm_up, 1)):
        _clear(runner)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        loss = step()
    synchronize()
    peak = torch.cuda.max_memory_allocated() - before + runner.weights if device.type == "cuda" else 0
    return step, loss, peak


def _found(runner: Any, work: Any, loss: Any, peak: int) -> tuple[float, int, list[float]]:
    """The loss, the peak on the fullest rank, norms of the gradients that the first steps left."""
    from meshfold.mesh import all_reduce

    group, device = work.mesh.group("pipe"), work.device
    norms = work.norms(runner.named())
    _clear(runner)
    # torch tells the rank of the last stage alone; ours every rank the same.
    known = torch.zeros(2, dtype=torch.float64, device=device)
    if loss is not None:
        known += torch.tensor([float(loss), 1.0], dtype=torch.float64, device=device)
    total, count = all_reduce(known, group).tolist()
    highest = all_reduce(torch.tensor(float(peak), dtype=torch.float64, device=device), group, "max")
    return total / count, int(highest), norms


def _clear(runner: Any) -> None:
    for _, parameter in runner.named():
        parameter.grad = None


def _clean_step(runner: Any, step: Callable[[], Any]) -> None:
    _clear(runner)
    step()


def _distance(norms: Sequence[float], reference: Sequence[float]) -> float:
    far = sum((a - b) ** 2 for a, b in zip(norms, reference, strict=True)) ** 0.5
    size = sum(b * b for b in reference) ** 0.5
    return float(far / size) if size else float("nan")


def _bubbles(
    lines: Sequence[Any], alone: dict[str, list[float]], pipeline: Any, microbatches: int, send: float
) -> dict[str, float]:
    """The bubble as it was, and as simulated: from costs of each stage by itself, and from those seen in the run."""
    from meshfold.pipeline import Costs, simulate_costs

    schedule = pipeline.program(microbatches).schedule
    seen = sorted(lines, key=lambda line: line.makespan)[len(lines) // 2]
    before = simulate_costs(schedule, Costs(**alone, send=send))
    after = simulate_costs(schedule, seen.costs(schedule, send))
    return {
        "measured": statistics.median(line.bubble for line in lines),
        "measured_milliseconds": seen.makespan,
        "simulated": before.bubble,
        "simulated_milliseconds": before.makespan,
        "simulated_from_run": after.bubble,
        "simulated_from_run_milliseconds": after.makespan,
    }


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
