"""Attention over sequences split over four ranks, side by side with torch's context_parallel.

Forward and backward of one causal attention with grouped key/value heads: ours in every mode with each kernel, and
torch.distributed.tensor.experimental.context_parallel as it comes and with the same kernels. All contestants hold the
same queries, keys and values, run in one process group, and are timed in interleaved rounds. `meshfold bench attention
--ranks 4` writes JSON with the raw times; `--report FILE.json` makes the table, the bars and the plot from it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.attention.report import DEFAULT
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
    lengths=[256, 512],
    check_length=128,
    heads=8,
    kv_heads=2,
    head_dim=16,
    dtype="float32",
    rounds=2,
    repeats=1,
    kernels=["flash"],
)
OURS = ("ring", "ring contiguous", "ulysses", "ring_ulysses")
KERNELS = ("cudnn", "efficient", "flash")
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
"""q, k, v and the gradient of the output: ``b s heads d``, whole"""


def main(argv: Sequence[str]) -> int:
    """Entry point of `meshfold bench attention`."""
    parser = argparse.ArgumentParser(prog="meshfold bench attention", description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4, help="local ranks, one a GPU where there are as many")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768, 131072], help="tokens of the whole sequence")
    parser.add_argument("--check-length", type=int, default=4096, help="tokens where all are compared with one process")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--kernels", nargs="+", default=["flash", "cudnn"], choices=KERNELS)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=2, help="steps a timing")
    parser.add_argument("--only", default="", help="comma-separated names of contestants")
    parser.add_argument("--list", action="store_true", help="the contestants")
    add_windows(parser)
    add_output(parser, "attention")
    args = parse_with_tiny(parser, argv, TINY)
    if args.report:
        from benchmarks.attention.report import report

        return report(args.report)
    if args.list:
        print("\n".join(_names(args)))
        return 0
    if "RANK" not in os.environ:
        _names(args)
        check_out(args.out)
        from meshfold.mesh.processes import launch

        return launch([str(Path(__file__).resolve()), *argv], args.ranks)
    return _measure(args)


@dataclass
class Way:
    """One way to attend.

    Attributes:
        name: what the table calls it.
        shard: a whole tensor ``b s heads d`` to what this rank is given of it, in the layout that the way wants.
        attend: q, k, v as sharded -> the output.
        around: what holds while it runs.
        note: why it could not run, or what is special about it.
        error: the largest relative error of output, dQ, dK and dV at the length where all are compared.
    """

    name: str
    shard: Callable[[Tensor], Tensor]
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    note: str = ""
    error: float = float("nan")
    runs: bool = True


def _names(args: argparse.Namespace) -> list[str]:
    names = [f"{mode} {kernel}" for kernel in args.kernels for mode in (*OURS, "torch")]
    names.append(DEFAULT)
    chosen = [part.strip() for part in args.only.split(",") if part.strip()]
    for name in chosen:
        if name not in names:
            raise SystemExit(f"there is no contestant {name!r}; there are: {', '.join(names)}")
    return [name for name in names if not chosen or name in chosen]


class Work:
    """Meshes, and the numbers that all contestants attend with."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        from meshfold.mesh import Mesh

        self.args, self.device = args, device
        self.dtype: torch.dtype = getattr(torch, args.dtype)
        self.ring = Mesh({"seq": args.ranks})
        outer = 2 if args.ranks % 2 == 0 and args.ranks > 2 else 1
        self.both = Mesh({"ring": outer, "ulysses": args.ranks // outer})

    def numbers(self, length: int) -> Inputs:
        """The same on every rank."""
        a = self.args
        generator = torch.Generator(self.device).manual_seed(length)

        def normal(heads: int) -> Tensor:
            shape = (1, length, heads, a.head_dim)
            return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(generator=generator)

        return normal(a.heads), normal(a.kv_heads), normal(a.kv_heads), normal(a.heads)

    def flops(self, length: int) -> float:
        """Of forward and backward, over the pairs that a causal mask leaves; a recomputed score in backward counts."""
        return 7.0 * length * length * float(self.args.heads * self.args.head_dim)


def _way(name: str, work: Work, torch_mesh: Any) -> Way:
    mode, _, kernel = name.rpartition(" ")
    if mode == "torch":
        return _theirs(name, kernel, work, torch_mesh)
    from meshfold.sequence import attention, shard_sequence

    kind = mode.split(" ")[0]
    order = "contiguous" if mode.endswith("contiguous") else None
    mesh = work.both if kind == "ring_ulysses" else work.ring

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, mesh=mesh, mode=kind, causal=True, order=order, kernel=kernel)

    return Way(name, lambda x: shard_sequence(x, mesh, kind, order=order).contiguous(), attend)


def _theirs(name: str, kernel: str, work: Work, torch_mesh: Any) -> Way:
    """torch's ring, with its own load balancing: an early and a late piece on each rank, as our zigzag deals them."""
    from benchmarks.peers import torch_context_parallel as peer
    from meshfold.sequence import shard_sequence

    return Way(
        name,
        lambda x: shard_sequence(x, work.ring, "ring").transpose(1, 2).contiguous(),
        peer.attend,
        lambda: peer.around(kernel, torch_mesh, work.device),
    )


def _repeated(way: Way) -> Way:
    from benchmarks.peers.torch_context_parallel import attend_repeated

    return Way(way.name, way.shard, attend_repeated, way.around, "keys and values repeated for every head of queries")


def _measure(args: argparse.Namespace) -> int:
    from torch.distributed.device_mesh import init_device_mesh

    from meshfold.mesh.processes import process_group

    world = process_group.start(timeout=180)
    if world.device.type == "cpu":
        torch.set_num_threads(1)
    work = Work(args, world.device)
    torch_mesh = init_device_mesh(world.device.type, (args.ranks,), mesh_dim_names=("cp",))
    reference = _reference(work.numbers(args.check_length))
    ways = []
    for name in _names(args):
        way = _checked(_way(name, work, torch_mesh), work, reference)
        if not way.runs and name.startswith("torch"):
            reason = way.note
            way = _checked(_repeated(_way(name, work, torch_mesh)), work, reference)
            way.note = f"{way.note}; shared: {reason}" if way.runs else reason
        ways.append(way)
        if world.rank == 0:
            print(f"{name:<24} error {way.error:.5f}  {way.note}", flush=True)
    result: dict[str, Any] = {
        "area": "attention",
        "machine": machine(),
        "settings": {k: v for k, v in vars(args).items() if k not in ("out", "report", "list")},
        "relative_error": {way.name: way.error for way in ways},
        "cases": {},
    }

    def save() -> None:  # after every round: a way that hangs takes the rest with it
        result["notes"] = {way.name: way.note for way in ways if way.note}
        if world.rank == 0:
            write(args.out, result)

    for length in args.lengths:
        case = {"milliseconds": {}, "peak_bytes": {}, "flops_per_rank": work.flops(length) / args.ranks}
        result["cases"][str(length)] = case
        _fill(case, ways, work, length, save)
        save()
    if world.rank == 0:
        from benchmarks.attention.report import described

        print(described(result))
        print(f"written to {args.out}")
    world.close()
    return 0


def _reference(whole: Inputs) -> tuple[Tensor, ...]:
    """Output, dQ, dK, dV of one process in float32, all scores at once."""
    q, k, v = (x.float().transpose(1, 2).requires_grad_() for x in whole[:3])
    from torch.nn.attention import SDPBackend, sdpa_kernel

    times = q.shape[1] // k.shape[1]
    with sdpa_kernel(SDPBackend.MATH):
        keys, values = (x.repeat_interleave(times, dim=1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, keys, values, is_causal=True)
    grads = torch.autograd.grad(out, (q, k, v), whole[3].float().transpose(1, 2))
    return tuple(x.detach().transpose(1, 2) for x in (out, *grads))


def _checked(way: Way, work: Work, reference: tuple[Tensor, ...]) -> Way:
    """Compare with one process; a way that cannot run says why. All ranks fail alike."""
    from meshfold.mesh import all_reduce

    group = work.ring.group("seq")
    worst = torch.zeros(4, 2, dtype=torch.float64, device=work.device)
    failed = torch.zeros(1, dtype=torch.float64, device=work.device)
    try:
        mine = [way.shard(x) for x in work.numbers(work.args.check_length)]
        leaves = [x.requires_grad_() for x in mine[:3]]
        with way.around():
            out = way.attend(*leaves)
            out.backward(mine[3])
        grads = [x.grad for x in leaves]
        for place, (found, whole) in enumerate(zip((out.detach(), *grads), reference, strict=True)):
            wanted = way.shard(whole)
            if found is None or found.shape != wanted.shape:
                raise RuntimeError(
                    f"a result of shape {None if found is None else tuple(found.shape)} for {tuple(wanted.shape)}"
                )
            worst[place, 0] = (found.float() - wanted).square().sum().double()
            worst[place, 1] = wanted.square().sum().double()
    except Exception as error:  # a contestant that cannot run is a row with its reason
        said = str(error).strip().splitlines() or [""]
        way.note = f"could not run: {type(error).__name__}: {said[0][:200]}"
        failed += 1
    sums, failures = all_reduce(worst, group), float(all_reduce(failed, group))
    way.runs = failures == 0
    if failures and not way.note:
        way.note = "could not run on another rank"
    if way.runs:
        way.error = float((sums[:, 0] / sums[:, 1]).sqrt().max())
    return way


def _fill(case: dict[str, Any], ways: Sequence[Way], work: Work, length: int, save: Callable[[], None]) -> None:
    """All that can run, on sequences of one length: milliseconds of the slowest rank, and peaks of the fullest."""
    from meshfold.mesh import all_reduce, barrier

    group, device = work.ring.group("seq"), work.device
    steps: dict[str, tuple[Way, Callable[[], None]]] = {}
    whole = work.numbers(length)
    for way in ways:
        if not way.runs:
            continue
        step, peak, reason = None, 0.0, ""
        try:
            step, peak = _warmed(way, whole, device)
        except Exception as error:  # too long for this way: shorter sequences keep their rows
            reason = f"could not run at {length} tokens: {type(error).__name__}: {str(error)[:200]}"
        # worst peak, and whether any rank failed: all must leave a way out together
        table = torch.tensor([peak, float(step is None)], dtype=torch.float64, device=device)
        highest, failed = all_reduce(table, group, "max").tolist()
        if failed or step is None:
            way.note = "; ".join(part for part in (way.note, reason or "could not run on another rank") if part)
            if device.type == "cuda":
                torch.cuda.empty_cache()
            continue
        case["peak_bytes"][way.name] = int(highest)
        steps[way.name] = way, step
    times: dict[str, list[float]] = case["milliseconds"]
    for _ in range(work.args.rounds):
        for name, (way, step) in steps.items():
            with way.around():
                step()  # what torch looks up anew in each context is not timed
                barrier(group, device)
                took = milliseconds(step, work.args.repeats)
            table = torch.tensor(took, dtype=torch.float64, device=device)
            times.setdefault(name, []).append(float(all_reduce(table, group, "max")))
        save()
    # Joules take longer than times: clocks have to settle.
    case["power"] = energy_windows(
        [Contestant(name, step, around=way.around) for name, (way, step) in steps.items()],
        ranks=work.args.ranks,
        window_s=work.args.window_s,
        settle_s=work.args.settle_s,
        between=lambda: barrier(group, device),
        agreed=agree(device),
        gpus=work.args.ranks if work.ring.rank == 0 else 0,
    )


def _warmed(way: Way, whole: Inputs, device: torch.device) -> tuple[Callable[[], None], float]:
    """A way's step after two that do not count, and what the second took at its peak beyond what was there: bytes."""
    mine = [way.shard(x) for x in whole]
    step, held = _step(way, [x.requires_grad_() for x in mine[:3]], mine[3]), 0
    with way.around():
        for _ in range(2):
            if device.type == "cuda":
                torch.cuda.synchronize()
                held = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
            step()
    synchronize()
    return step, float(torch.cuda.max_memory_allocated() - held) if device.type == "cuda" else 0.0


def _step(way: Way, leaves: list[Tensor], dout: Tensor) -> Callable[[], None]:
    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        way.attend(*leaves).backward(dout)

    return step


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
