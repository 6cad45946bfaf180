"""Colossal-AI's legacy 2D: Llama blocks of its ``Linear2D``, SUMMA by broadcasts on a square grid of ranks.

Its layers, groups and products are those of the package; only what Llama needs and it lacks is written here: RMSNorm over a split
hidden size (two sums of one number a row, where its LayerNorm2D takes four), rotary positions and grouped attention, as the
DTensor peer computes them. Q, K and V are one ``Linear2D``, gate and up another, as its own transformers had it. It computes in
the dtype of the weights, without autocast, which would cast to fp16.

Tested with Colossal-AI 0.5.0. Importing the layers the usual way imports all of Colossal-AI, with a dozen libraries in versions
of their own, so the packages around them stand empty here and their ``__init__`` does not run.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.peers.absent import AbsentError
from benchmarks.peers.dtensor import rotate

PACKAGES = ("", ".legacy", ".legacy.nn", ".legacy.nn.layer", ".nn", ".interface")
"""those that stand empty, below ``colossalai``"""
NEEDED = "give --wheels of colossalai 0.5.0 (from pip wheel --no-deps colossalai==0.5.0) and psutil"


class Grid:
    """The package's layers, and its groups on all ranks of the running process group: q rows of q."""

    def __init__(self, ranks: int) -> None:
        """Make the groups.

        Raises:
            AbsentError: if the package, or what it imports, is not installed.
            ValueError: for ranks that are not a square.
        """
        self.q = math.isqrt(ranks)
        if self.q**2 != ranks:
            raise ValueError(f"{ranks} ranks: Colossal-AI's 2D takes a square number of ranks, as 4")
        self.layers = _import("colossalai.legacy.nn.layer.parallel_2d.layers")
        mode: Any = _import("colossalai.legacy.context").ParallelMode
        context: Any = _import("colossalai.legacy.core").global_context
        rank, everyone = dist.get_rank(), list(range(ranks))
        context.load_config(dict(parallel=dict(tensor=dict(size=ranks, mode="2d"))))
        # What its launch does once it has started a process group.
        cpu = dist.new_group(everyone, backend="gloo") if dist.get_backend() != "gloo" else None
        context._register_dist(rank, ranks, dist.GroupMember.WORLD, cpu, everyone, mode.GLOBAL)
        context.add_global_rank(mode.GLOBAL, rank)
        context.init_parallel_groups()
        warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # of the collectives that it calls
        self.layers.seed = lambda mode: nullcontext()  # its seeds of each rank need CUDA; all weights are replaced
        self.row: int
        self.col: int
        self.row, self.col = context.get_local_rank(mode.PARALLEL_2D_COL), context.get_local_rank(mode.PARALLEL_2D_ROW)
        self.along_row = context.get_group(mode.PARALLEL_2D_ROW)
        self.modes = (mode.PARALLEL_2D_ROW, mode.PARALLEL_2D_COL)

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's part of ``b s h``: sequences over the rows of the grid, the hidden size over its columns.

        Raises:
            ValueError: if the sequences cannot be divided.
        """
        if whole.shape[0] % self.q:
            raise ValueError(
                f"{whole.shape[0]} sequences: Colossal-AI's 2D takes a multiple of {self.q}, whole ones on each row"
            )
        return whole.chunk(self.q)[self.row].chunk(self.q, -1)[self.col].contiguous()

    def linear(self, *parts: Tensor) -> nn.Module:
        """Return a ``Linear2D`` of weights ``[out, in]`` side by side; each column of the grid has its share of every part."""
        columns, inner = sum(part.shape[0] for part in parts), parts[0].shape[1]
        layer: nn.Module = self.layers.Linear2D(inner, columns, bias=False, dtype=parts[0].dtype)
        mine = torch.cat([part.chunk(self.q)[self.col] for part in parts]).chunk(self.q, 1)[self.row]
        with torch.no_grad():
            layer.weight.copy_(mine.T)  # type: ignore[operator]
        return layer


class Norm2D(nn.Module):
    """RMSNorm of ``b s h/q``, its weights split over the whole grid as those of ``LayerNorm2D`` are."""

    def __init__(self, grid: Grid, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.grid, self.hidden, self.eps = grid, weight.numel(), eps
        self.weight = nn.Parameter(weight.chunk(grid.q)[grid.col].chunk(grid.q)[grid.row].clone())

    def forward(self, x: Tensor) -> Tensor:
        grid = self.grid
        part, place = self.weight.numel(), (grid.row, grid.col)
        scale: Tensor = grid.layers.add_bias_2d(None, self.weight, part, *place, *grid.modes, True, 0, 0, 1, grid.q**2)
        normed: Tensor = Normalized.apply(x, self.hidden, self.eps, grid.along_row)  # type: ignore[no-untyped-call]
        return normed * scale


class Normalized(torch.autograd.Function):
    """x divided by the root mean square of its whole row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, hidden: int, eps: float, group: Any) -> Tensor:
        wide = x.float() if x.dtype is not torch.float64 else x
        squares = wide.square().sum(-1, keepdim=True)
        dist.all_reduce(squares, group=group)
        inverse = (squares / hidden + eps).rsqrt()
        ctx.save_for_backward(x, inverse)
        ctx.hidden, ctx.group = hidden, group
        return (wide * inverse).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        x, inverse = ctx.saved_tensors
        y, wide = x.to(inverse.dtype) * inverse, grad.to(inverse.dtype)
        along = (wide * y).sum(-1, keepdim=True)
        dist.all_reduce(along, group=ctx.group)
        return ((wide - y * (along / ctx.hidden)) * inverse).to(grad.dtype), None, None, None


class Block2D(nn.Module):
    """A Llama block, ``b s h`` cut by :meth:`Grid.cut`."""

    def __init__(self, grid: Grid, weights: dict[str, Tensor], heads: int, kv_heads: int, eps: float) -> None:
        super().__init__()
        w, q = weights, grid.q
        if heads % q or kv_heads % q:
            raise ValueError(f"{heads} heads and {kv_heads} key/value heads: Colossal-AI's 2D takes multiples of {q}")
        self.d, self.heads = w["q"].shape[0] // heads, (heads // q, kv_heads // q, kv_heads // q)
        self.norm1, self.norm2 = Norm2D(grid, w["norm1"], eps), Norm2D(grid, w["norm2"], eps)
        self.qkv, self.out = grid.linear(w["q"], w["k"], w["v"]), grid.linear(w["out"])
        self.gate_up, self.down = grid.linear(w["gate"], w["up"]), grid.linear(w["down"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s = x.shape[:2]
        q, k, v = self.qkv(self.norm1(x)).view(b, s, -1, self.d).split(self.heads, 2)
        q, k, v = (t.transpose(1, 2) for t in (rotate(q, cos, sin), rotate(k, cos, sin), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        x = x + self.out(y.transpose(1, 2).reshape(b, s, -1))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


def _import(name: str) -> Any:
    """Import a module of the package, with the packages around it empty.

    Raises:
        AbsentError: if it is not installed.
    """
    if "colossalai" not in sys.modules:
        found = importlib.util.find_spec("colossalai")
        if found is None or not found.submodule_search_locations:
            raise AbsentError(f"colossalai is not installed: {NEEDED}")
        [root, *_] = found.submodule_search_locations
        for below in PACKAGES:
            package = ModuleType(f"colossalai{below}")
            package.__path__ = [str(Path(root, *below.split(".")))]
            sys.modules[package.__name__] = package
        package.__dict__["OptimizerWrapper"] = object  # of interface, for a checkpoint that is never written
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch.cuda.amp's decorators
            return importlib.import_module(name)
    except ImportError as error:
        raise AbsentError(f"{error}: {NEEDED}") from error
