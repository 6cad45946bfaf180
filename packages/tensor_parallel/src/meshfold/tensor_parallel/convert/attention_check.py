"""Trial of attention's own code on a subset of its heads, before anything is changed.

No weights are needed. A copy of the module gets stand-ins for its projections, which return given numbers, and for the output
layer, which keeps its input. That input must be, with a rank's share of the projections, the rank's share of the input with all of
them.
"""

from __future__ import annotations

import copy
import math
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from meshfold.mesh import Mesh, Part, Placement
from meshfold.tensor_parallel.convert.forward_code import config_size, parameters_of
from meshfold.tensor_parallel.convert.head_biases import biases_of, guesses, names_of, own_heads
from meshfold.tensor_parallel.convert.heads import Heads
from meshfold.tensor_parallel.modes import Mode
from meshfold.tensor_parallel.module_kinds import features, is_linear, norm_kind, norm_size, norms_by_head

_TOKENS = ((2, 3), (6,))
"""Tokens that a module is tried with: ``b s h``, then ``m h``."""
_TORCH = str(Path(torch.__file__).parent)
_WRONG_SIZE = re.compile(r"shape '\[([\d, ]+)\]' is invalid for input of size (\d+)")
"""What torch says of a shape that a view cannot have."""
_SMALL = 1 << 20
"""Elements of parameters up to which a child of the module, such as a norm of heads, is copied."""


class _Reached(Exception):
    """Ends a trial forward at the output layer; the rest does not matter."""

    def __init__(self, given: Tensor) -> None:
        super().__init__()
        self.given = given


class _RefusesNoHeads(TorchFunctionMode):
    """Function mode that refuses attention with zero heads, on which torch 2.11 crashes by a division by zero."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            for x in (*args, *(kwargs or {}).values()):
                if isinstance(x, Tensor) and x.dim() > 3 and x.shape[1] == 0:
                    raise ValueError(f"attention of shape {list(x.shape)} has no heads")
        return func(*args, **(kwargs or {}))


class _Gives(nn.Module):
    """Stand-in for a projection."""

    def __init__(self, y: Tensor, reads: Tensor | None) -> None:
        super().__init__()
        self.y, self.reads = y, reads

    def forward(self, x: Tensor) -> Tensor:
        if self.reads is not None and x is not self.reads:
            raise ValueError("a projection does not read the module's input")
        return self.y.clone()


class _NormsInput(nn.Module):
    """Stand-in for a norm of the module's input that also accepts the stream's local width."""

    def __init__(self, norm: nn.Module, given: Tensor) -> None:
        super().__init__()
        self.norm, self.given = norm, given

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x if x is self.given else self.norm(x)
        return y


class _ScalesHeads(nn.Module):
    """Stand-in for a norm of all heads together, which no rank computes of its own heads alone: it multiplies by a weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.weight.shape[0]:
            raise ValueError(f"a norm of all heads, {self.weight.shape[0]} elements, is given {x.shape[-1]}")
        return x * self.weight


class _Keeps(nn.Module):
    """Stand-in for the output layer."""

    def forward(self, x: Tensor) -> Tensor:
        raise _Reached(x)


class AttentionTrial:
    """Trial of one attention module: with all of its heads, with the first rank's, and with the last rank's."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        heads: Heads,
        mesh: Mesh,
        mode: Mode,
        tables: tuple[str, ...] = (),
        biases_split: bool = False,
        norms: tuple[str, ...] = (),
        input_width: int | None = None,
        stand_in: bool = False,
    ) -> None:
        """Args:
        tables: full names of the module's tables of biases, a column a head, which are split with the heads.
        biases_split: the module's biases come from such a table.
        norms: full names of the module's norms of queries and keys, or of modules with one for each head.
        input_width: of the module's input on a rank; None: the width that its projections read.
        stand_in: the input has a shape but no values; only the projections may read it.
        """
        self.input_width, self.stand_in = input_width, stand_in
        self.tables = [table.rpartition(".")[2] for table in tables]
        self.norms = [norm.rpartition(".")[2] for norm in norms]
        self.biases_split = biases_split
        self.name, self.module, self.heads, self.mesh, self.mode = name, module, heads, mesh, mode
        self.width = heads.heads * heads.head_dim

    def why_not(self) -> str:
        """Return why the module cannot work on a subset of its heads; empty if it can, or if it could not be tried."""
        if self.mode.head_divisor(self.mesh) == 1:
            return ""
        with torch.device("cpu"):  # the caller may have chosen the meta device
            return self._try()

    def _try(self) -> str:
        for tokens in _TOKENS:
            for arguments in self._arguments(tokens):
                given = self._given(tokens)
                whole, again = (self._run(given, None, tokens, arguments) for _ in range(2))
                if not isinstance(whole, Tensor) or not isinstance(again, Tensor):
                    continue
                if whole.shape[-1] != self.width or not torch.equal(whole, again):
                    continue
                return self._compare(given, whole, tokens, arguments)
        # No trial succeeded: the forward takes unknown arguments, or needs a device.
        found, kind = config_size(self.module), type(self.module).__name__
        if not self.biases_split and (taken := biases_of(self.module)):
            return f"{kind} takes {taken[0]}, which is made for all heads outside of it, and its forward could not be tried"
        return f"{kind}'s forward reads {found}, which counts all heads" if found else ""

    def _compare(
        self, given: dict[str, Tensor], whole: Tensor, tokens: tuple[int, ...], arguments: dict[str, Any]
    ) -> str:
        kind, local = type(self.module).__name__, self.heads.heads // self.mode.head_divisor(self.mesh)
        for rank in (0, self.mesh.world_size - 1):
            wanted = self._share(whole, (Part(self.width),), rank)
            found = self._run(given, rank, tokens, arguments)
            trial = f"tried with {local} of its {self.heads.heads} heads, {kind}'s own code"
            if not isinstance(found, Tensor):
                return f"{trial} fails{self._failure(found)}"
            if found.shape != wanted.shape or not torch.allclose(
                found.double(), wanted.double(), rtol=1e-4, atol=1e-4, equal_nan=True
            ):
                return f"{trial} computes other values than for the same heads among all{self._hint()}"
        return ""

    def _failure(self, error: Exception) -> str:
        """Return the line of the user's code that failed, the reason, and what to write there."""
        reason = str(error).strip().partition("\n")[0]
        line = next(
            (
                f" at {Path(frame.filename).name}:{frame.lineno}, `{frame.line}`"
                for frame in reversed(traceback.extract_tb(error.__traceback__))
                if frame.line and not frame.filename.startswith((_TORCH, __file__))
            ),
            "",
        )
        what = f"{line} ({type(error).__name__}: {reason})"
        if line and self._is_of_all_heads(reason):
            return f"{what}. The size written there is that of all heads: write -1 for it, as in y.reshape(b, t, -1)"
        return f"{what}{self._hint()}"

    def _is_of_all_heads(self, reason: str) -> bool:
        """Return True if a view failed because its shape has all heads, while a rank has only some."""
        found = _WRONG_SIZE.search(reason)
        if found is None or config_size(self.module):
            return False
        wanted = math.prod(int(size) for size in found[1].split(","))
        return wanted == int(found[2]) * self.mode.head_divisor(self.mesh)

    def _hint(self) -> str:
        found = config_size(self.module)
        if found:
            return f"; it reads {found}, which counts all heads"
        if self.heads.fused or self.heads.interleaved:
            return "; its fused projection may have another order than query, key, value"
        return ""

    def _given(self, tokens: tuple[int, ...]) -> dict[str, Tensor]:
        """Return the output of each projection with all heads, by full name."""
        generator = torch.Generator().manual_seed(0)
        return {
            name: torch.randn(*tokens, self._features(name)[1], generator=generator, dtype=torch.float64)
            for name in self.heads.projections
        }

    def _features(self, name: str) -> tuple[int, int]:
        return features(self.module.get_submodule(name.rpartition(".")[2]))

    def _share(self, y: Tensor, parts: tuple[Part, ...], rank: int) -> Tensor:
        """Return this rank's columns."""
        axes = self.mode.layout("hidden")["n"]
        place = Placement(shape=(y.shape[-1],), axes=(axes,), parts={0: parts} if parts else {})
        return torch.cat([y.narrow(-1, a, n) for a, n in place.segments(self.mesh, 0, rank)], dim=-1)

    def _run(
        self, given: dict[str, Tensor], rank: int | None, tokens: tuple[int, ...], arguments: dict[str, Any]
    ) -> Tensor | Exception:
        """Return the input of the output layer, or the error; with all heads if ``rank`` is None."""
        try:
            twin = self._twin()
            width = self._features(self.heads.projections[0])[0] if rank is None else self.input_width
            width = width or self._features(self.heads.projections[0])[0]
            strict = self.stand_in and rank is not None
            x = torch.full((*tokens, width), math.nan if strict else 0.0, dtype=torch.float64)
            for leaf, child in twin._modules.items():
                if child is not None and norm_kind(child):
                    twin._modules[leaf] = self._norm_of_heads(leaf, child, rank) or _NormsInput(child, x)
                elif child is not None and leaf in self.norms and rank is not None:
                    twin._modules[leaf] = self._own_norms(child, rank)
            for name, y in given.items():
                share = y if rank is None else self._share(y, self.heads.parts(name, self.mesh, self.mode), rank)
                twin._modules[name.rpartition(".")[2]] = _Gives(share, x if strict else None)
            if rank is not None:
                arguments = self._own_biases(arguments, rank)
                self.heads.set_counts(twin, self.mesh, self.mode)
                for table in self.tables:
                    weight: Any = twin.get_submodule(table).weight
                    weight.data = self._share(weight.data, (), rank)
            forward: Callable[..., Any] = type(self.module).forward
            with torch.no_grad(), _RefusesNoHeads():
                found = forward(twin, x, **arguments)
        except _Reached as reached:
            return reached.given
        except Exception as error:  # the model's code may raise anything
            return error
        found = found[0] if isinstance(found, tuple) and found else found
        return found if isinstance(found, Tensor) else TypeError(f"returned {type(found).__name__}")

    def _own_biases(self, arguments: dict[str, Any], rank: int) -> dict[str, Any]:
        """Return the arguments with the biases of this rank's heads, as :class:`HeadBiases` gives them."""

        def take(x: Tensor) -> Tensor:
            return self._share(x.movedim(1, -1), (Part(self.heads.heads),), rank).movedim(-1, 1)

        names = () if self.biases_split else names_of(self.module)[0]
        return {
            name: own_heads(name, x, self.heads.heads, take) if name in names and isinstance(x, Tensor) else x
            for name, x in arguments.items()
        }

    def _norm_of_heads(self, leaf: str, norm: nn.Module, rank: int | None) -> nn.Module | None:
        """Return a stand-in for a norm of all heads together, with this rank's of them; None for any other norm."""
        size = norm_size(norm)
        part = self.heads.normalised(size, self.mesh, self.mode)
        if leaf not in self.norms or size == self.heads.head_dim or part is None:
            return None
        weight = torch.linspace(1.0, 2.0, size, dtype=torch.float64)
        return _ScalesHeads(weight if rank is None else self._share(weight, (part,), rank))

    def _own_norms(self, module: nn.Module, rank: int) -> nn.Module:
        """Return a module with a norm for each head, with this rank's of them."""
        twin, leaf = copy.copy(module), norms_by_head(module)
        norms: Any = module.get_submodule(leaf)
        part = self.heads.counted(len(norms), self.mesh, self.mode)
        if part is not None:
            own = self._share(torch.arange(len(norms)), (part,), rank)
            twin._modules = {leaf: nn.ModuleList(norms[i] for i in own.tolist())}
        return twin

    def _twin(self) -> nn.Module:
        """Return a twin of the module without its linear layers, on the CPU. The module itself is not affected."""
        if "forward" in vars(self.module):
            raise TypeError("the instance has a forward of its own")
        twin = copy.copy(self.module)
        twin._modules = {leaf: self._child(child) for leaf, child in self.module._modules.items()}
        twin._buffers = {key: None if b is None else _real(b) for key, b in self.module._buffers.items()}
        twin._parameters = {
            key: None if p is None else nn.Parameter(_real(p), requires_grad=False)
            for key, p in self.module._parameters.items()
        }
        twin.training = False
        config: Any = getattr(twin, "config", None)
        if getattr(config, "_attn_implementation", "sdpa") not in ("eager", "sdpa"):
            config = copy.copy(config)  # other kernels need a GPU; the number of heads does not depend on it
            config._attn_implementation = "eager"
            twin.config = config
        return twin

    def _child(self, child: nn.Module | None) -> nn.Module | None:
        if child is None:
            return None
        if is_linear(child):
            return _Keeps() if features(child)[0] == self.width else child
        if isinstance(child, nn.ModuleList) and len(child) and is_linear(child[0]):  # the layer and its dropout
            return nn.ModuleList([self._child(inner) for inner in child])  # type: ignore[misc]
        if sum(p.numel() for p in child.parameters()) > _SMALL:
            return child
        made = copy.deepcopy(child).eval()
        for module in made.modules():
            module._buffers = {key: None if b is None else _real(b) for key, b in module._buffers.items()}
            module._parameters = {
                key: None if p is None else nn.Parameter(_real(p), requires_grad=False)
                for key, p in module._parameters.items()
            }
            for name, hooks in vars(module).items():
                if name.startswith(("_forward_hooks", "_forward_pre_hooks")):
                    hooks.clear()
        return made

    def _arguments(self, tokens: tuple[int, ...]) -> Iterator[dict[str, Any]]:
        """Yield guesses for the forward's arguments after the first, by their names."""
        found: dict[str, Any] = {}
        length = tokens[-1]
        named = list(parameters_of(self.module).items())[1:]
        for name, parameter in named:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            if name == "position_ids":
                found[name] = torch.arange(length)[None]
            elif name == "cache_position":
                found[name] = torch.arange(length)
            elif parameter.default is parameter.empty:
                found[name] = None
        biases = [{}] if self.biases_split else list(guesses(self.module, self.heads.heads, tokens))
        if all(name != "position_embeddings" for name, _ in named):
            yield from ({**found, **given} for given in biases)
            return
        sizes = [getattr(self.module, name, None) for name in ("rotary_ndims", "rotary_dim")]
        config = getattr(self.module, "config", None)
        rope = getattr(config, "rope_parameters", None)
        partial = rope.get("partial_rotary_factor") if isinstance(rope, dict) else None
        sizes += [int(self.heads.head_dim * partial)] if isinstance(partial, int | float) else []
        for size in dict.fromkeys([*sizes, self.heads.head_dim]):
            if isinstance(size, int) and size > 0:
                angles = torch.arange(length, dtype=torch.float64)[None, :, None].expand(1, length, size)
                found["position_embeddings"] = (angles.cos(), angles.sin())
                yield from ({**found, **given} for given in biases)


def _real(value: Tensor) -> Tensor:
    """Return a copy on the CPU: float64 if it is floating point, ones for a meta tensor."""
    if value.is_meta:
        kind = torch.float64 if value.is_floating_point() else value.dtype
        return torch.ones(value.shape, dtype=kind)
    copied = value.detach().to("cpu", copy=True)
    return copied.double() if copied.is_floating_point() else copied
