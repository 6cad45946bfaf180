"""Regional compilation: the repeated blocks of a model, compiled one by one.

A block's forward is compiled, not its call. Hooks stay outside of the graph: parameters are gathered, traced and released
around it, and names and state dicts are as before. Blocks of one class and with parameters of the same shapes, in one list, share
their compiled code. Other blocks of that class have code of their own: otherwise torch.compile takes the sizes that differ
between them for sizes that change from step to step, and gives up after some of them. An input with gaps, as a slice of a joined
sequence has them, is copied for the same reason: Flux's first block of a kind gets whole tensors, the others slices.

A block that recomputes its activations can do so in its backward graph: what no gradient needs is left out there, such as its last
product (27 % of the matmuls of a Llama's block), and the rest is compiled together with the gradients. A compiled forward that is
repeated outside of its graph runs whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cache, update_wrapper, wraps
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshfold.engine.model.repeated_blocks import find_blocks, parameter_shapes
from meshfold.kernels.fuse import is_compiled
from meshfold.mesh import ParallelSpec, SpecError, did_you_mean
from meshfold.mesh.spec import argument_checks as settings

_KEYS = {"backend": None, "mode": None, "dynamic": None, "options": None}
_GRAPH_MODES = ("reduce-overhead", "max-autotune")
"""Modes that replay CUDA graphs, whose parameters and inputs must not move."""


@dataclass(frozen=True, kw_only=True)
class CompileSettings:
    """The engine's argument ``compile``, checked: arguments of ``torch.compile``.

    Attributes:
        backend: name of a back end of torch.compile, or a function of a graph and its inputs.
        mode: of Inductor; None for its default.
        dynamic: whether sizes are symbols from the start; None: once they have changed.
        options: settings of Inductor for these blocks alone, such as ``{"force_layout_optimization": True}``.
    """

    backend: str | Callable[..., Any] = "inductor"
    mode: str | None = None
    dynamic: bool | None = None
    options: Mapping[str, Any] | None = field(default=None, hash=False)

    @classmethod
    def parse(cls, value: object) -> CompileSettings | None:
        """Parse ``True``, ``False`` or a dict with keys among ``backend``, ``mode``, ``dynamic``, ``options``; None for ``False``.

        Raises:
            SpecError: for anything else, and for names that torch.compile does not know.
        """
        if value is False or value is None:
            return None
        if value is True:
            return cls()
        if not isinstance(value, Mapping):
            raise SpecError(
                f"compile={value!r}: write True, False, or dict(backend=..., mode=..., dynamic=..., options=...) with values of "
                "torch.compile"
            )
        settings.known_keys("compile", value, value, _KEYS)
        found = cls(**value)
        if not callable(found.backend):
            _check_name(value, "backend", found.backend, torch._dynamo.list_backends(exclude_tags=()))
        if found.mode is not None:
            _check_name(value, "mode", found.mode, [*torch._inductor.list_mode_options()])
            if found.backend != "inductor":
                raise SpecError(f"compile={value!r}: only the back end 'inductor' has modes: leave mode or backend out")
        if found.options is not None:
            _check_options(value, found)
        if found.dynamic not in (None, True, False):
            raise SpecError(f"compile={value!r}: write dynamic=True, False or None (once sizes have changed)")
        return found

    @property
    def backend_name(self) -> str:
        """Name of the back end, for reports."""
        name = self.backend if isinstance(self.backend, str) else getattr(self.backend, "__name__", None)
        return name or type(self.backend).__name__

    def check(self, spec: ParallelSpec) -> None:
        """Check that blocks can be compiled this way under a spec.

        Raises:
            SpecError: for CUDA graphs if parameters or inputs of the blocks move; for folding blocks that ranks share.
        """
        if spec.axial is not None and spec.axial.size > 1:
            raise SpecError(
                "compile under axial: the collectives of folding blocks, which run under other work, cannot be compiled yet: leave "
                "compile out, or axial"
            )
        moving = "zero" if spec.zero is not None else "pipeline" if spec.pipeline is not None else None
        if self.mode in _GRAPH_MODES and moving is not None:
            why = "parameters" if moving == "zero" else "inputs of the blocks"
            raise SpecError(
                f"compile=dict(mode={self.mode!r}) replays CUDA graphs, which need fixed addresses, but under {moving} "
                f"{why} move: leave mode out, or write mode='max-autotune-no-cudagraphs'"
            )


def _check_name(value: object, key: str, name: object, known: list[str]) -> None:
    if name not in known:
        shown = ", ".join(n for n in known if "TESTING" not in n)
        raise SpecError(
            f"compile={value!r}: there is no {key} {name!r}.{did_you_mean(str(name), known)} Known: {shown}"
        )


def _check_options(value: object, found: CompileSettings) -> None:
    options = found.options
    if found.backend != "inductor":
        raise SpecError(f"compile={value!r}: only the back end 'inductor' has options: leave options or backend out")
    if found.mode is not None:
        raise SpecError(
            f"compile={value!r}: a mode is a set of options: leave mode out, and write its options "
            f"({torch._inductor.list_mode_options(found.mode)}) among yours"
        )
    if not isinstance(options, Mapping):
        raise SpecError(f"compile={value!r}: options: write a dict of Inductor's settings and their values")
    known = torch._inductor.list_options()
    for name in options:
        if name not in known:
            raise SpecError(
                f"compile={value!r}: Inductor has no option {name!r}.{did_you_mean(str(name), known)} All: "
                "torch._inductor.list_options()"
            )


class NotOneGraph(Exception):
    """A block cannot recompute in its backward graph: it makes several, has side effects, or has got inputs of too many sizes."""


@dataclass(frozen=True, kw_only=True)
class _Changed:
    """The forwards of a block: its own before (None: its class's), what was compiled, and that compiled."""

    before: Callable[..., Any] | None
    method: Callable[..., Any]
    compiled: Callable[..., Any]

    def is_in_place(self, block: nn.Module) -> bool:
        """Return True if the block's forward is the compiled one; False if it has been wrapped since."""
        return block.__dict__.get("forward") is self.compiled


class CompiledBlocks:
    """The compiled modules of a model: its repeated blocks, or the model if it has none."""

    def __init__(
        self,
        settings: CompileSettings,
        model: nn.Module,
        spec: ParallelSpec,
        blocks: Mapping[str, nn.Module] | None = None,
    ) -> None:
        """Args:
        settings: how they are compiled.
        model: this rank's part of the trained model.
        spec: under which.
        blocks: those of the model, by name, if known.

        Raises:
            SpecError: for a model that is already compiled, and one without repeated blocks that cannot be compiled whole.
        """
        if any(is_compiled(module) for module in model.modules()):
            raise SpecError(
                f"compile={settings}: {type(model).__name__} or one of its blocks is already compiled: leave compile out, or give "
                "the model before block.compile() or torch.compile(block)"
            )
        self._settings = settings
        self._where = "" if blocks is None else " of this rank's stages"
        if blocks is None:
            blocks = find_blocks(model)
        if not blocks:
            _check_whole(model, spec)
            blocks = {"": model}
        self.blocks = dict(blocks)
        self.backend = settings.backend
        self._changed: dict[nn.Module, _Changed] = {}
        kinds: dict[object, dict[object, int]] = {}  # numbers of kinds that would share code
        for name, block in self.blocks.items():
            found = block.forward
            code = getattr(found, "__code__", None)
            alike = kinds.setdefault(code, {})
            kind = alike.setdefault((type(block), name.rpartition(".")[0], parameter_shapes(block)), len(alike))
            if kind and isinstance(found, MethodType):
                found = _with_own_code(found, kind)
            compiled = _without_gaps(self._compile(found))
            self._changed[block] = _Changed(before=block.__dict__.get("forward"), method=found, compiled=compiled)
            block.forward = compiled

    def _compile(self, forward: Callable[..., Any], *, one_graph: bool = False) -> Callable[..., Any]:
        options = self._settings.options
        return torch.compile(
            forward,
            fullgraph=one_graph,
            backend=self._settings.backend,
            mode=self._settings.mode,
            dynamic=self._settings.dynamic,
            options=None if options is None else {**options},
        )

    def recomputing(self, block: nn.Module) -> Callable[..., Any] | None:
        """Return a block's forward, compiled so that its backward graph recomputes its activations; compiled when it is called.

        A call raises :class:`NotOneGraph`, before anything has run, if the block cannot be compiled so.

        Args:
            block: of the model.

        Returns:
            None if the block is not compiled, its forward is no method or has been wrapped since (a wrapper would be left out),
            or it replays CUDA graphs.
        """
        changed = self._changed.get(block)
        if changed is None or not isinstance(changed.method, MethodType) or not changed.is_in_place(block):
            return None
        if self._settings.mode in _GRAPH_MODES:
            return None
        compiled = _without_gaps(self._compile(_recomputed(changed.method), one_graph=True))

        @wraps(compiled)
        def forward(*args: Any, **kwargs: Any) -> Any:
            try:
                return compiled(*args, **kwargs)
            except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
                raise NotOneGraph(str(error)) from error

        return forward

    def __str__(self) -> str:
        """Return a line that lists the compiled blocks: ``compiled: 24 blocks LlamaDecoderLayer, backend inductor``."""
        if "" in self.blocks:
            what = f"{type(self.blocks['']).__name__} as a whole"
        else:
            kinds = Counter(type(block).__name__ for block in self.blocks.values())
            what = ", ".join(f"{n} block{'s' * (n > 1)} {kind}" for kind, n in kinds.items())
        given = {"mode": self._settings.mode, "dynamic": self._settings.dynamic, "options": self._settings.options}
        options = "".join(f", {name} {value}" for name, value in given.items() if value is not None)
        return f"compiled: {what}{self._where}, backend {self._settings.backend_name}{options}"

    def close(self) -> None:
        """Restore the modules' own forward, unless it has been wrapped again."""
        for block, changed in self._changed.items():
            if not changed.is_in_place(block):
                continue
            if changed.before is None:
                del block.forward
            else:
                block.forward = changed.before
        self._changed.clear()


def _without_gaps(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled forward whose inputs that need gradients are copied if they have gaps, for all blocks to share its code."""

    @wraps(compiled)
    def forward(*args: Any, **kwargs: Any) -> Any:
        copies: list[tuple[Tensor, Tensor, int]] = []

        def dense(x: Any) -> Any:
            if not (isinstance(x, Tensor) and x.requires_grad and _has_gaps(x)):
                return x
            copy = x.contiguous()
            copies.append((x, copy, copy._version))
            return copy

        out = compiled(*map(dense, args), **{name: dense(x) for name, x in kwargs.items()})
        for x, copy, version in copies:
            if copy._version != version:  # the block writes into its input
                x.copy_(copy)
        return out

    return forward


def _has_gaps(x: Tensor) -> bool:
    """Return True for a tensor whose elements do not lie close together, unless some of them share their memory."""
    if x.layout is not torch.strided or x.is_contiguous():
        return False
    strides = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return 0 not in strides and last + 1 > x.numel() > 0


def _with_own_code(method: MethodType, mark: Hashable) -> Callable[..., Any]:
    """Return a method with another code object, one for each mark, for which torch.compile keeps graphs and sizes apart."""
    function = method.__func__
    if not isinstance(function, FunctionType):
        return method
    own = FunctionType(
        _copy_of(function.__code__, mark),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    update_wrapper(own, function)
    own.__kwdefaults__ = function.__kwdefaults__
    return MethodType(own, method.__self__)


@cache
def _copy_of(code: CodeType, mark: Hashable) -> CodeType:
    """Return the same copy of a code each time: engines made one after the other share what was compiled."""
    return code.replace(co_name=f"{code.co_name}_{getattr(mark, 'co_name', mark)}")


def _recomputed(method: MethodType) -> Callable[..., Any]:
    """Return a method that checkpoints another; those of one code have one code."""
    function = method.__func__

    def recompute(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return function(self, *args, **kwargs)

        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return _with_own_code(MethodType(recompute, method.__self__), getattr(function, "__code__", function))


def _check_whole(model: nn.Module, spec: ParallelSpec) -> None:
    """Check that a model without repeated blocks can be compiled as a whole.

    Raises:
        SpecError: if parts of it are hooked or called separately.
    """
    entry = "zero" if spec.zero is not None else "pipeline" if spec.pipeline is not None else None
    if entry is not None:
        raise SpecError(
            f"compile: {type(model).__name__} has no repeated blocks (modules of several layers), and under {entry} a "
            f"model cannot be compiled as a whole: put its blocks into an nn.ModuleList, or leave compile or {entry} out"
        )
