"""Llama-8B-shaped blocks under each tensor-parallel mode, beside torch's DTensor and FSDP2 and Colossal-AI's legacy 2D.

Forward and backward of a stack of blocks on all ranks of one machine; all contestants hold the same weights, run in
one process group, and are timed in interleaved rounds after clocks have settled. `meshfold bench tensor-parallel
--ranks 4` writes JSON with the raw times, mean power and clock; `--report FILE.json` makes table, bars and plot from it.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own

import torch
import torch._dynamo

from benchmarks.common import (
    Contestant,
    add_output,
    add_rounds,
    agree,
    check_out,
    machine,
    parse_with_tiny,
    synchronize,
    timed_windows,
    write,
)
from benchmarks.tensor_parallel.contestants import NAMES, build
from benchmarks.tensor_parallel.parts import PARTS
from benchmarks.tensor_parallel.report import report, table
from benchmarks.tensor_parallel.work import Work
from benchmarks.wheels import add_wheels, unpacked

TINY = dict(
    layers=1,
    hidden=32,
    heads=4,
    kv_heads=2,
    ffn=48,
    batch=2,
    seq_len=16,
    dtype="float32",
    rounds=2,
    window_s=0.0,
    settle_s=0.0,
)
"""Settings of ``--tiny``."""
NOT_SETTINGS = ("out", "report", "profile", "only", "tiny", "wheels")


def main(argv: list[str]) -> int:
    """Entry point of `meshfold bench tensor-parallel`."""
    parser = argparse.ArgumentParser(prog="meshfold bench tensor-parallel", description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4, help="local ranks, one a GPU where there are as many")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, help="elements of a head; hidden / heads unless given")
    parser.add_argument("--ffn", type=int, default=14336)
    parser.add_argument("--batch", type=int, default=4, help="sequences")
    parser.add_argument("--seq-len", type=int, default=4096, help="tokens a sequence")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--only", default="", help="comma-separated names of contestants")
    parser.add_argument("--profile", default="", help="contestant to profile instead; writes the kernels' times")
    add_rounds(parser)
    add_output(parser, "tensor_parallel")
    add_wheels(parser)
    args = parse_with_tiny(parser, argv, TINY)
    if args.report:
        return report(args.report)
    if "RANK" not in os.environ:
        _names(args)
        check_out(args.out)
        from meshfold.mesh.processes import launch

        with unpacked(args.wheels):
            return launch([str(Path(__file__).resolve()), *argv], args.ranks)
    return _measure(args)


def _names(args: argparse.Namespace) -> list[str]:
    """The contestants that were asked for; of ``--only 2d`` also ``2d compiled``.

    Raises:
        Failure: for one that is not there.
    """
    from meshfold.cli.arguments import Failure

    asked = [args.profile] if args.profile else [part.strip() for part in args.only.split(",") if part.strip()]
    for part in asked:
        if part not in NAMES:
            raise Failure(f"there is no contestant {part!r}; there are: {', '.join(NAMES)}")
    if args.profile:
        return asked
    return [name for name in NAMES if not asked or name in asked or name.removesuffix(" compiled") in asked]


def _measure(args: argparse.Namespace) -> int:
    from meshfold.mesh import Mesh, barrier
    from meshfold.mesh.processes import process_group

    world = process_group.start()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    torch.set_default_device(device)
    torch._dynamo.config.recompile_limit = 64  # each mode compiles the same blocks anew
    whole = Mesh({"tensor": args.ranks})
    work = Work(args, device)
    contestants: list[Contestant] = []
    for name in _names(args):
        contestants.append(build(name, work, args))
        if whole.rank == 0:
            made = contestants[-1]
            error = "" if name in PARTS else f"error {made.error:.4f}  "
            print(f"{name:<37} {error}peak {made.peak_bytes / 2**30:.2f} GiB  {made.note}", flush=True)
    if args.profile:
        _profile(contestants[0], whole.rank)
        world.close()
        return 0
    result = {
        "area": "tensor-parallel",
        "machine": machine(),
        "settings": {k: v for k, v in vars(args).items() if k not in NOT_SETTINGS},
        "flops_per_step_per_rank": work.flops() / args.ranks,
        "peak_bytes": {c.name: c.peak_bytes for c in contestants},
        "relative_error": {c.name: c.error for c in contestants if c.name not in PARTS},
        "notes": {c.name: c.note for c in contestants if c.note},
    }
    for times, power in timed_windows(
        contestants,
        rounds=args.rounds,
        window_s=args.window_s,
        settle_s=args.settle_s,
        between=lambda: barrier(whole.group("tensor"), device),
        agreed=agree(device),
        gpus=args.ranks if whole.rank == 0 else 0,
    ):
        if whole.rank == 0:  # after each round: one that hangs takes the rest with it
            result |= {"milliseconds": times, "power": power}
            write(args.out, result)
    if whole.rank == 0:
        print(table(result))
        print(f"written to {args.out}")
    world.close()
    return 0


def _profile(contestant: Contestant, rank: int) -> None:
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        contestant.step()  # type: ignore[misc]
    synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(3):
            contestant.step()  # type: ignore[misc]
        synchronize()
    if rank == 0:
        print(found.key_averages().table(sort_by="cuda_time_total", row_limit=45, max_name_column_width=70))
        if out := os.environ.get("OUT"):
            found.export_chrome_trace(f"{out}/trace.json")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
