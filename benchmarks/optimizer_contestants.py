"""Contestants of `meshfold bench optimizers`: what each steps on, how it is made, and what an optimizer must move at least."""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

ADAMW, CHUNKED = "AdamW of an engine (torch fused, copies)", "AdamW of an engine under ZeRO"
LAMB, MUON, FORWARD = "LAMB", "Muon", "forward and backward"
Step = Callable[[], object]
MATRICES = "matrices"
LR = 1e-5
"""Small, since all steps are on one gradient."""


@dataclass
class Parameters:
    """Tensors that a contestant steps on.

    Attributes:
        masters: float32, with gradients.
        copies: bfloat16, of each.
        roles: of each, as in ``meshfold.optimizers``.
        options: the shape, to build the model of.
    """

    masters: list[nn.Parameter]
    copies: list[Tensor]
    roles: list[str]
    options: argparse.Namespace | None = None

    @classmethod
    def of(cls, options: argparse.Namespace) -> Parameters:
        """Return those of a Llama whose head is tied, with random weights and gradients."""
        h, head = options.hidden, options.hidden // options.heads
        shapes: list[tuple[str, tuple[int, ...]]] = [("embeddings", (options.words, h))]
        for _ in range(options.layers):
            sizes = ((h, h), (options.kv_heads * head, h), (options.kv_heads * head, h), (h, h))
            shapes += [(MATRICES, size) for size in (*sizes, (options.ffn, h), (options.ffn, h), (h, options.ffn))]
            shapes += [("norms_and_biases", (h,))] * 2
        shapes.append(("norms_and_biases", (h,)))
        return cls.random(shapes, "cuda" if torch.cuda.is_available() else "cpu", torch.float32, options)

    @classmethod
    def random(
        cls,
        shapes: Sequence[tuple[str, tuple[int, ...]]],
        device: str,
        dtype: torch.dtype,
        options: argparse.Namespace | None = None,
    ) -> Parameters:
        """Return parameters of these roles and shapes."""
        generator = torch.Generator(device).manual_seed(0)
        masters = []
        for _, shape in shapes:
            made = [torch.randn(shape, device=device, generator=generator).to(dtype) for _ in range(2)]
            parameter = nn.Parameter(made[0].mul_(0.02))
            parameter.grad = made[1].mul_(1e-3)
            masters.append(parameter)
        copies = [parameter.detach().to(torch.bfloat16) for parameter in masters]
        return cls(masters, copies, [role for role, _ in shapes], options)

    @property
    def count(self) -> int:
        """How many numbers are trained."""
        return sum(parameter.numel() for parameter in self.masters)

    @property
    def matrices(self) -> int:
        """How many of them are in matrices."""
        return sum(p.numel() for p, role in zip(self.masters, self.roles, strict=True) if role == MATRICES)

    def groups(self) -> list[dict[str, Any]]:
        """Return a group for each role that is there."""
        by_role: dict[str, list[nn.Parameter]] = {}
        for parameter, role in zip(self.masters, self.roles, strict=True):
            by_role.setdefault(role, []).append(parameter)
        return [{"params": some, "role": role} for role, some in by_role.items()]

    def split(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return matrices, and all others."""
        pairs = list(zip(self.masters, self.roles, strict=True))
        return [p for p, role in pairs if role == MATRICES], [p for p, role in pairs if role != MATRICES]


@dataclass
class Rival:
    """One way to step.

    Attributes:
        name: what the table calls it.
        make: makes an optimizer of :class:`Parameters` and returns its step, which ends with the copies.
        least_bytes: what the algorithm must move, a parameter; 0: it is not memory that limits it.
        exact: makes a step by plain operations for a check in float64; None: a peer. Both take ``lr`` then.
        needs: settings of dion's Muon that this one gives.
        runs: it has been tried.
        note: why it could not run, or what is special about it.
        peak_bytes: largest memory of a step beyond what was there before it.
        launches: operations on the device in a step.
        error: of three small steps.
    """

    name: str
    make: Callable[..., Step]
    least_bytes: float = 0.0
    exact: Callable[..., Step] | None = None
    needs: tuple[str, ...] = ()
    runs: bool = False
    note: str = ""
    peak_bytes: int = 0
    launches: int = 0
    error: float = field(default=float("nan"))

    def check_small(self) -> None:
        """Compare three steps on a few small tensors with plain operations in float64, if there is a way to."""
        if self.exact is None:
            return
        shapes = [(MATRICES, (128, 64)), (MATRICES, (96, 384)), ("embeddings", (300, 7)), ("norms_and_biases", (33,))]
        device = "cuda" if torch.cuda.is_available() else "cpu"
        given, wanted = (Parameters.random(shapes, device, torch.float32) for _ in range(2))
        wanted.masters = [_in_float64(parameter) for parameter in wanted.masters]
        before = [parameter.detach().clone() for parameter in wanted.masters]
        for step in (self.make(given, lr=1e-2), self.exact(wanted, lr=1e-2)):
            for _ in range(3):
                step()
        moved = [a.detach() - b for a, b in zip(wanted.masters, before, strict=True)]
        found = [a.detach().double() - b for a, b in zip(given.masters, before, strict=True)]
        self.error = max(float((a - b).norm() / b.norm()) for a, b in zip(found, moved, strict=True))
        if any(
            not torch.equal(copy, master.to(torch.bfloat16))
            for copy, master in zip(given.copies, given.masters, strict=True)
        ):
            raise RuntimeError("the bfloat16 parameters are not those of the masters after a step")

    def count_launches(self, step: Step) -> None:
        """Note the operations of a step that reach the device: kernels by torch's profiler; on a CPU operations of torch."""
        if not torch.cuda.is_available():
            with _Counting() as counted:
                step()
            self.launches = counted.count
            return
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
        self.launches = sum(event.count for event in profile.key_averages())


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func._schema.name.startswith(("aten::view", "aten::detach", "aten::unsqueeze", "aten::alias"))
        return func(*args, **(kwargs or {}))


def _in_float64(parameter: nn.Parameter) -> nn.Parameter:
    made = nn.Parameter(parameter.detach().double())
    assert parameter.grad is not None
    made.grad = parameter.grad.double()
    return made


def ours(
    cls: type, parameters: Parameters, *, kernels: bool = True, roles: bool = False, lr: float = LR, **settings: Any
) -> Step:
    """Return a step as an engine makes it without ZeRO: the optimizer with kernels and copies, then what is not copied."""
    from meshfold.kernels import STEP_KERNELS

    optimizer = cls(parameters.groups() if roles else parameters.masters, lr=lr, **settings)
    pairs = dict(zip(parameters.masters, parameters.copies, strict=True))
    if kernels and hasattr(optimizer, "kernels"):
        optimizer.kernels, optimizer.copies = STEP_KERNELS, pairs

    def step() -> None:
        optimizer.step()
        written: set[Tensor] = getattr(optimizer, "copied", set())
        rest = [pair for pair in pairs.items() if pair[0] not in written]
        written.clear()
        if rest:
            with torch.no_grad():
                torch._foreach_copy_([copy for _, copy in rest], [master for master, _ in rest])

    return step


def chunked_adamw(parameters: Parameters) -> Step:
    """Return a step of our kernel on flat chunks of split masters, as ZeRO keeps them; the chunks are made for it."""
    from meshfold.kernels import AdamSettings, SplitState, adam_step

    device, elements = parameters.masters[0].device, 1 << 26
    sizes = [elements] * (parameters.count // elements) + [parameters.count % elements]
    chunks = [
        (SplitState.of(torch.zeros(size, device=device)), torch.full((size,), 1e-3, device=device)) for size in sizes
    ]
    counted = [0]

    def step() -> None:
        counted[0] += 1
        for state, gradient in chunks:
            adam_step(state, gradient, AdamSettings(lr=LR), step=counted[0])

    return step


def torch_muon(parameters: Parameters) -> Step:
    """Return a step of ``torch.optim.Muon`` on matrices and of torch's fused AdamW on the rest.

    Raises:
        ImportError: before torch 2.9.
    """
    if not hasattr(torch.optim, "Muon"):
        raise ImportError(f"torch {torch.__version__} has no Muon")
    matrices, rest = parameters.split()
    return _steps(parameters, torch.optim.Muon(matrices, lr=LR), torch.optim.AdamW(rest, lr=LR, fused=True))


def dion_muon(parameters: Parameters, **settings: Any) -> Step:
    """Return a step of microsoft/dion's Muon.

    Raises:
        ImportError: if it is not there.
    """
    cls = importlib.import_module("dion").Muon
    matrices, rest = parameters.split()
    groups = [{"params": matrices}, {"params": rest, "algorithm": "adamw"}]
    return _steps(parameters, cls(groups, lr=LR, mu=0.95, nesterov=True, **settings))


def without_missing(found: Sequence[Rival]) -> tuple[list[Rival], str]:
    """Leave out those that need settings which the installed dion does not have; return the rest, and a line that says so, or "".

    Without dion all of them are left out but the one that needs no settings: its row says why it cannot run.
    """
    if not any(one.needs for one in found):
        return list(found), ""
    try:
        known = list(inspect.signature(importlib.import_module("dion").Muon.__init__).parameters)[2:]
    except ImportError:
        known = []
    missing = [name for one in found for name in one.needs if name not in known]
    if not missing:
        return list(found), ""
    kept = [one for one in found if all(name in known for name in one.needs)]
    names = ", ".join(repr(one.name) for one in found if one not in kept)
    has = f"this version of dion has no {', '.join(missing)}; its Muon has {', '.join(known)}"
    return kept, f"left out {names}: {has if known else 'dion is not installed'}"


def fused_lamb(parameters: Parameters) -> Step:
    """Return a step of DeepSpeed's FusedLamb.

    Raises:
        ImportError: if DeepSpeed is not there.
    """
    cls = importlib.import_module("deepspeed.ops.lamb").FusedLamb
    return _steps(parameters, cls(parameters.masters, lr=LR, weight_decay=0.01, max_grad_norm=0.0))


def _steps(parameters: Parameters, *optimizers: torch.optim.Optimizer) -> Step:
    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters.copies, list(parameters.masters))

    return step


def forward_and_backward(parameters: Parameters) -> Step:
    """Return a forward and backward of a model of the same shape in bfloat16, beside which a step is."""
    from meshfold.models import LlamaConfig, build

    options = parameters.options
    assert options is not None  # only the whole shape has a model
    config = LlamaConfig(
        vocab_size=options.words,
        hidden=options.hidden,
        layers=options.layers,
        heads=options.heads,
        kv_heads=options.kv_heads,
        ffn=options.ffn,
        max_positions=options.length,
        tie=True,
    )
    device = parameters.masters[0].device
    with device:
        model = build(config).to(torch.bfloat16)
    ids = torch.randint(options.words, (options.rows, options.length), device=device)
    weights = list(model.parameters())
    return lambda: torch.autograd.grad(model(input_ids=ids, labels=ids).loss, weights)


def rivals() -> Iterator[Rival]:
    """Yield all contestants; the first warms the device up."""
    from meshfold import optimizers

    decayed: Mapping[str, Any] = dict(weight_decay=0.01)

    def pair(name: str, cls: type, least_bytes: float, **settings: Any) -> Rival:
        exact = {**settings, **({"ns_dtype": "same"} if cls is optimizers.Muon else {})}
        return Rival(name, partial(ours, cls, **settings), least_bytes, partial(ours, cls, kernels=False, **exact))

    yield Rival(ADAMW, partial(ours, torch.optim.AdamW, fused=True, **decayed), 30)
    yield Rival(CHUNKED, chunked_adamw, 28)
    yield pair(LAMB, optimizers.Lamb, 42, **decayed)
    yield Rival("DeepSpeed FusedLamb", fused_lamb, 42)
    yield pair("Lion", optimizers.Lion, 22, **decayed)
    yield pair(MUON, optimizers.Muon, 0, roles=True)
    yield Rival(FORWARD, forward_and_backward)
    yield Rival("torch Muon", torch_muon)
    yield Rival("dion Muon", dion_muon)
    for words, setting in (("Triton", "use_triton"), ("Gram matrices", "use_gram_newton_schulz")):
        given: dict[str, Any] = {setting: True}
        yield Rival(f"dion Muon, {words}", partial(dion_muon, **given), needs=(setting,))
    yield pair("CAME", optimizers.Came, 34)
    yield Rival("Adafactor (torch's)", partial(ours, optimizers.Adafactor), 26)
    yield pair("Adafactor in transformers' form", optimizers.AdafactorHF, 26, relative_step=False)
