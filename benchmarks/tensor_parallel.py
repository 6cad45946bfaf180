"""Llama-8B-shaped blocks under each tensor-parallel mode, side by side with torch's DTensor.

Forward and backward of a stack of blocks on all ranks of one machine; all contestants hold the same weights, run in
one process group, and are timed in interleaved rounds. `meshfold bench tensor-parallel --ranks 4` writes JSON with
the raw times; `--report FILE.json` makes the table and the plot from it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that this file runs on its own

import torch
import torch._dynamo
from torch import Tensor, nn

from benchmarks import reports
from benchmarks.common import (
    Contestant,
    add_output,
    check_out,
    interleave,
    machine,
    median,
    synchronize,
    write,
)

MODES: dict[str, tuple[str, dict[str, int]]] = {
    "1d+sequence": ("1d+sequence", {"tensor": 4}),
    "1d": ("1d", {"tensor": 4}),
    "1d+tokens": ("1d+tokens", {"tensor": 4}),
    "2d": ("2d", {"row": 2, "col": 2}),
    "3d": ("3d", {"a": 2, "b": 2, "c": 1}),
}
LOWERED = {
    "1d+sequence by ring": ("1d+sequence", "ring"),
    "2d by stream": ("2d", "stream"),
    "1d+sequence by push": ("1d+sequence", "push"),
    "1d+sequence by push compiled": ("1d+sequence", "push"),
    "1d+tokens by push compiled": ("1d+tokens", "push"),
}
PEERS = ("dtensor", "dtensor compiled", "dtensor compiled async")


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
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=2, help="steps a timing")
    parser.add_argument("--only", default="", help="comma-separated names of contestants")
    parser.add_argument("--profile", default="", help="contestant to profile instead; writes the kernels' times")
    add_output(parser, "tensor_parallel")
    args = parser.parse_args(argv)
    if args.report:
        return report(args.report)
    if "RANK" not in os.environ:
        _names(args)
        check_out(args.out)
        from meshfold.mesh.processes import launch

        return launch([str(Path(__file__).resolve()), *argv], args.ranks)
    return _measure(args)


def _names(args: argparse.Namespace) -> list[str]:
    """The contestants that were asked for; of ``--only 2d`` also ``2d compiled``.

    Raises:
        Failure: for one that is not there.
    """
    from meshfold.cli.arguments import Failure

    names = [f"{mode}{suffix}" for mode in MODES for suffix in ("", " compiled")] + [*LOWERED, *PEERS]
    asked = [args.profile] if args.profile else [part.strip() for part in args.only.split(",") if part.strip()]
    for part in asked:
        if part not in names:
            raise Failure(f"there is no contestant {part!r}; there are: {', '.join(names)}")
    if args.profile:
        return asked
    return [name for name in names if not asked or name in asked or name.removesuffix(" compiled") in asked]


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
        contestants.append(_build(name, work, args))
        if whole.rank == 0:
            made = contestants[-1]
            print(
                f"{name:<28} error {made.error:.4f}  peak {made.peak_bytes / 2**30:.2f} GiB  {made.note}",
                flush=True,
            )
    if args.profile:
        _profile(contestants[0], whole.rank)
        world.close()
        return 0
    times = interleave(
        contestants,
        rounds=args.rounds,
        warm_up=2,
        repeats=args.repeats,
        between=lambda: barrier(whole.group("tensor"), device),
    )
    if whole.rank == 0:
        result = {
            "area": "tensor-parallel",
            "machine": machine(),
            "settings": {k: v for k, v in vars(args).items() if k not in ("out", "report", "profile", "only")},
            "flops_per_step_per_rank": work.flops() / args.ranks,
            "milliseconds": times,
            "peak_bytes": {c.name: c.peak_bytes for c in contestants},
            "relative_error": {c.name: c.error for c in contestants},
            "notes": {c.name: c.note for c in contestants if c.note},
        }
        write(args.out, result)
        print(table(result))
        print(f"written to {args.out}")
    world.close()
    return 0


class Work:
    """The blocks' weights, the input, and the reference output, alike on every rank."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        from meshfold.models.attention import Rotary

        self.args, self.device = args, device
        self.dtype = getattr(torch, args.dtype)
        d = self.head_dim = args.head_dim or args.hidden // args.heads
        cos, sin = Rotary(d, 500000.0)(None, args.seq_len, device)
        self.rotary = (cos.to(self.dtype), sin.to(self.dtype))
        self.x = self.random("x", (args.batch * args.seq_len, args.hidden), 1.0)
        self.dy = self.random("dy", self.x.shape, 1.0 / math.sqrt(args.hidden))
        self.reference = self._reference()

    def random(self, name: str, shape: tuple[int, ...], std: float) -> Tensor:
        """Normal numbers that depend on the name alone."""
        generator = torch.Generator(self.device).manual_seed(sum(map(ord, name)) * 7919)
        return torch.randn(shape, generator=generator, dtype=torch.float32, device=self.device).mul_(std).to(self.dtype)

    def weights(self, layer: int) -> dict[str, Tensor]:
        """The whole weights of one block, ``[out, in]``."""
        h, f, heads = self.args.hidden, self.args.ffn, self.args.heads * self.head_dim
        kv = self.args.kv_heads * self.head_dim
        shapes = {
            "q": (heads, h),
            "k": (kv, h),
            "v": (kv, h),
            "out": (h, heads),
            "gate": (f, h),
            "up": (f, h),
            "down": (h, f),
        }
        found = {name: self.random(f"{layer}.{name}", shape, 0.02) for name, shape in shapes.items()}
        return {**found, "norm1": torch.ones(h, dtype=self.dtype), "norm2": torch.ones(h, dtype=self.dtype)}

    def block(self, layer: int) -> nn.Module:
        """A serial block of ours."""
        from meshfold.models.config import LlamaConfig
        from meshfold.models.llama import Block

        a = self.args
        config = LlamaConfig(
            vocab_size=1,
            hidden=a.hidden,
            layers=a.layers,
            heads=a.heads,
            kv_heads=a.kv_heads,
            head_dim=a.head_dim,
            ffn=a.ffn,
            norm_eps=1e-5,
        )
        with torch.device("meta"):
            block = Block(config)
        w = self.weights(layer)
        block.norm1.weight, block.norm2.weight = nn.Parameter(w["norm1"]), nn.Parameter(w["norm2"])
        block.attn.qkv.weight = nn.Parameter(torch.cat((w["q"], w["k"], w["v"])))
        block.attn.out.weight = nn.Parameter(w["out"])
        block.mlp.gate_up.weight = nn.Parameter(torch.cat((w["gate"], w["up"])))
        block.mlp.down.weight = nn.Parameter(w["down"])
        return block

    def _reference(self) -> Tensor:
        """The output of the serial blocks, one block in memory at a time."""
        x = self.x
        with torch.no_grad():
            for layer in range(self.args.layers):
                x = self.block(layer)(x, self.args.seq_len, self.rotary)
        return x

    def error(self, found: Tensor, wanted: Tensor) -> float:
        """‖found − wanted‖ / ‖wanted‖."""
        return float((found.float() - wanted.float()).norm() / wanted.float().norm())

    def flops(self) -> float:
        """Floating point operations of forward and backward, causal attention counted as half."""
        a = self.args
        d, m = self.head_dim, a.batch * a.seq_len
        matmuls = a.hidden * (a.heads + 2 * a.kv_heads) * d + a.heads * d * a.hidden + 3 * a.hidden * a.ffn
        return float(a.layers * (6 * m * matmuls + 6 * m * a.seq_len * a.heads * d))


class _Stack(nn.Module):
    """Blocks in a list, called one by one: what parallelize converts."""

    flat_tokens = True

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)


def _build(name: str, work: Work, args: argparse.Namespace) -> Contestant:
    synchronize()
    before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    try:
        made, inputs, check = _peer(name, work, args) if name in PEERS else _ours(name, work, args)
    except Exception as error:  # a contestant that cannot run is a row with its reason
        if args.profile:
            raise
        return Contestant(name, note=f"could not run: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
    x, dy = inputs

    def step() -> None:
        out = made(x)
        out.backward(dy)
        x.grad = None

    contestant = Contestant(name, step)
    try:
        with torch.no_grad():
            contestant.error = check(made(x))
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            step()
        synchronize()
        if torch.cuda.is_available():
            contestant.peak_bytes = torch.cuda.max_memory_allocated() - before
    except Exception as error:
        if args.profile:
            raise
        return Contestant(name, note=f"could not run: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
    return contestant


Built = tuple[Callable[[Tensor], Tensor], tuple[Tensor, Tensor], Callable[[Tensor], float]]


def _ours(name: str, work: Work, args: argparse.Namespace) -> Built:
    from meshfold.mesh import Mesh, Placement
    from meshfold.tensor_parallel import MODES as ALL
    from meshfold.tensor_parallel import parallelize

    of, lowering = LOWERED.get(name, (name.removesuffix(" compiled"), "gather"))
    mode, axes = MODES[of]
    if math.prod(axes.values()) != args.ranks:
        axes = (
            {"tensor": args.ranks}
            if mode.startswith("1d")
            else {**axes, next(iter(axes)): args.ranks // 2, list(axes)[1]: 2}
        )
    mesh = Mesh(axes)
    stack = _Stack([])
    for layer in range(args.layers):
        one = _Stack([work.block(layer)])
        parallelize(one, mesh, mode, lowering=lowering)
        stack.blocks.append(one.blocks[0])
    residual = ALL[mode].layout("residual")
    place = Placement(shape=tuple(work.x.shape), axes=(residual["m"], residual["h"]))
    x = place.shard(work.x, mesh).requires_grad_()
    dy = place.shard(work.dy, mesh)
    blocks = (
        [torch.compile(b, fullgraph=True, dynamic=False) for b in stack.blocks]
        if "compiled" in name
        else list(stack.blocks)
    )

    def forward(x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x, args.seq_len, work.rotary)
        return x

    parameters = list(stack.parameters())

    def run(x: Tensor) -> Tensor:
        for parameter in parameters:
            parameter.grad = None
        return forward(x)

    return run, (x, dy), lambda out: work.error(out, place.shard(work.reference, mesh))


def _peer(name: str, work: Work, args: argparse.Namespace) -> Built:
    from torch.distributed.device_mesh import init_device_mesh

    from benchmarks.peers.dtensor import PeerBlock, shard

    device_mesh = init_device_mesh(work.device.type, (args.ranks,))
    blocks: list[Any] = []
    for layer in range(args.layers):
        with torch.device("meta"):
            block = PeerBlock(args.hidden, args.heads, args.kv_heads, work.head_dim, args.ffn, 1e-5)
        block.fill(work.weights(layer))
        shard(block, device_mesh)
        blocks.append(block)
    parameters = [p for block in blocks for p in block.parameters()]
    if "async" in name:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        enable_symm_mem_for_group(device_mesh.get_group().group_name)
    if "compiled" in name:
        options: dict[str, Any] | None = {"_micro_pipeline_tp": True} if "async" in name else None
        blocks = [torch.compile(b, fullgraph=True, dynamic=False, options=options) for b in blocks]
    rank = device_mesh.get_local_rank()

    def cut(whole: Tensor) -> Tensor:
        shaped = whole.view(args.batch, args.seq_len, -1)
        return shaped.chunk(args.ranks, 1)[rank].contiguous()

    x, dy = cut(work.x).requires_grad_(), cut(work.dy)

    def run(x: Tensor) -> Tensor:
        for parameter in parameters:
            parameter.grad = None
        for block in blocks:
            x = block(x, *work.rotary)
        return x.to_local() if hasattr(x, "to_local") else x

    return run, (x, dy), lambda out: work.error(out, cut(work.reference))


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


def table(result: dict[str, Any]) -> str:
    """Markdown: ratios first, then times and memory."""
    times = result["milliseconds"]
    teraflops = result["flops_per_step_per_rank"] / 1e9
    peers = [name for name in PEERS if name in times]
    head = ["contestant", *(f"{peer} ÷ this" for peer in peers), "ms", "TFLOP/s a rank", "peak GiB", "error"]
    rows = [
        [
            name,
            *(reports.ratio(values, times[peer]) for peer in peers),
            f"{median(values):.1f}",
            f"{teraflops / median(values):.0f}",
            f"{result['peak_bytes'][name] / 2**30:.2f}",
            f"{result['relative_error'][name]:.4f}",
        ]
        for name, values in times.items()
    ]
    return "\n".join(reports.table(head, [*rows, *result["notes"].items()]))


def _in_words(name: str) -> str:
    """Return a contestant as the plot names it."""
    mode, _, rest = name.partition(" ")
    words = {"1d+sequence": "1D + sequence", "1d+tokens": "attention by tokens", "dtensor": "torch DTensor"}.get(
        mode, mode.upper()
    )
    return f"{words} {rest}".strip()


def report(path: Path) -> int:
    """Write the table and the plot next to a result."""
    result = json.loads(path.read_text())
    times = {name: median(values) for name, values in result["milliseconds"].items()}
    names = sorted(times, key=times.__getitem__)
    ours = [name for name in names if name not in PEERS]
    figure, panels = reports.panels(1, 2, 0.45 * len(names) + 1.4)
    left, right = panels[0]
    words = {name: _in_words(name) for name in names}
    ordered = {name: times[name] for name in names}
    reports.draw_bars(left, ordered, ours, "forward and backward, ms", words=words)
    peaks = {name: result["peak_bytes"][name] / 2**30 for name in names}
    reports.draw_bars(right, peaks, ours, "peak of GPU memory, GiB")
    right.set_yticks([])
    settings = result["settings"]
    gpu = result["machine"].get("gpu", "CPU")
    title = f"{settings['layers']} Llama blocks, {settings['ranks']} × {gpu}\nMeshfold blue, DTensor grey"
    reports.title(figure, title)
    reports.save(figure, [_described(result), "", table(result)], path)
    return 0


def _described(result: dict[str, Any]) -> str:
    s, m = result["settings"], result["machine"]
    return (
        f"{s['layers']} blocks, hidden {s['hidden']}, {s['heads']} heads, {s['kv_heads']} key/value heads, "
        f"inner {s['ffn']}; "
        f"{s['batch']} × {s['seq_len']} tokens, {s['dtype']}, forward and backward; {s['ranks']} ranks, "
        f"{m.get('gpu', 'CPU')}, torch {m['torch']}, Triton {m['triton']}. Median of {s['rounds']} interleaved rounds; "
        f"ratios above 1 say that the row is faster than that peer (lowest and highest round in brackets)."
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
