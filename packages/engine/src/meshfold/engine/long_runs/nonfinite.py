"""``Engine(nonfinite=...)``: handling of nan or infinite losses and gradients, and the search for where they arose.

The norm of the gradient is checked before the optimizer steps. Both it and the loss are the same numbers on every rank, so all
ranks decide the same. Nothing else is checked while both are finite. Otherwise the micro-steps since the last step are
repeated, with the same batches, weights and random numbers, and this time every module is checked.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshfold.engine.errors import NonFiniteError
from meshfold.mesh import Mesh, SpecError, all_gather, did_you_mean
from meshfold.mesh.model_io import local_shard
from meshfold.mesh.parameters import uncompiled_name

if TYPE_CHECKING:
    from meshfold.engine.batches.batch import Batch
    from meshfold.engine.world import World


Mode = Literal["error", "skip", "report"]


def check_mode(value: object) -> Mode | None:
    """Check the argument ``nonfinite``.

    Raises:
        SpecError: for an unknown mode.
    """
    known = get_args(Mode)
    if value is None:
        return None
    if value not in known:
        raise SpecError(
            f"nonfinite={value!r}:{did_you_mean(str(value), known)} Known: 'error' (raise), 'skip' (leave the step out), "
            "'report' (warn, and step), None (no check)"
        )
    return value  # type: ignore[return-value]


class MicroStep(NamedTuple):
    """A micro-step of ``train_step`` that can be repeated.

    Attributes:
        number: counted over the whole run.
        work: its batch.
        loss: its global loss.
    """

    number: int
    work: Batch
    loss: Tensor


class Replay(Protocol):
    """A function that repeats micro-steps and returns the first non-finite value."""

    def __call__(self, micro_steps: Sequence[MicroStep], *, keep: bool) -> Finding | None:
        """``keep``: afterwards the gradients are complete, as they were."""


class NonFiniteGuard:
    """Check of every accumulation before the optimizer steps.

    Attributes:
        finding: where the last non-finite value arose.
    """

    def __init__(self, mode: Mode | None, *, says: bool) -> None:
        """Args:
        mode: what to do; None: no check.
        says: this rank prints the warnings.
        """
        self._mode, self._says = mode, says
        self._seen: list[MicroStep] = []
        self._known = False
        self.finding: Finding | None = None

    def saw(self, number: int, work: Batch, loss: Tensor) -> None:
        """Record a micro-step of ``train_step``: its number, its batch and its global loss."""
        if self._mode is not None:
            self._seen.append(MicroStep(number, work, loss))

    def forget(self) -> None:
        """Forget the micro-steps: the accumulation is over."""
        self._seen.clear()

    def refuses(self, norm: Tensor, *, step: int, scaled: bool, replay: Replay, forget: Callable[[], None]) -> bool:
        """Return True if the step must be skipped. Under fp16 the loss scale handles gradients that overflow.

        Args:
            norm: of the gradient.
            step: number of the step.
            scaled: under fp16.
            replay: repeats the step's micro-steps.
            forget: releases its gradients.

        Raises:
            NonFiniteError: in mode ``"error"``, on every rank, naming the tensor that is not finite.
        """
        mode = self._mode
        if mode is None:
            return False
        loss = next((seen.loss for seen in self._seen if not math.isfinite(seen.loss)), None)
        if loss is None and (scaled or math.isfinite(norm)):
            self._known = False
            return False
        what = f"the loss is {float(loss)}" if loss is not None else f"the gradient's norm is {float(norm)}"
        if mode == "report" and self._known:  # NaN propagates: already reported
            return False
        self._known = True
        self.finding = replay(self._seen, keep=mode == "report") if self._seen else None
        found = f"step {step}: {what}. {self.finding or _OWN_LOOP}"
        if mode == "error":
            forget()
            raise NonFiniteError(
                f"{found}\nNothing was stepped: the weights are unchanged. A smaller learning rate, clip_grad_norm or "
                "another precision may help; Engine(..., nonfinite='skip') skips such steps"
            )
        if self._says:
            end = " The step is left out" if mode == "skip" else ""
            print(f"warning: {found}{end}", file=sys.stderr, flush=True)
        return mode == "skip"


_OWN_LOOP = (
    "Only train_step finds where it arose, and this was a loop of your own: "
    "torch.autograd.detect_anomaly() finds the operation"
)


_BYTES = 512  # size of a finding that is sent to the other ranks

# In causal order.
_PHASES = ("parameter", "input", "forward", "loss", "backward")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The first non-finite value.

    Attributes:
        phase: ``parameter``, ``input`` (of the batch), ``forward``, ``loss`` (the loss function) or ``backward``.
        micro_step: counted over the whole run, from 0.
        rank: that found it.
        module: its name in the whole model, and its class; of a parameter its name.
        stage: of a pipeline.
        order: in the computation; ranks of one stage run the same modules, so theirs can be compared.
        values: description of the values.
        place: the rank's coordinates.
    """

    phase: str
    micro_step: int
    rank: int
    module: str = ""
    stage: int = 0
    order: int = 0
    values: str = ""
    place: str = ""

    @classmethod
    def of_loss(cls, micro_step: int, rank: int) -> Finding:
        """Return True if every module was finite."""
        return cls(phase="loss", micro_step=micro_step, rank=rank)

    def key(self) -> tuple[int, int, int, int, int]:
        """Sort key: a smaller one is earlier."""
        stage = -self.stage if self.phase == "backward" else self.stage
        return self.micro_step, _PHASES.index(self.phase), stage, self.order, self.rank

    def __str__(self) -> str:
        what = {
            "parameter": f"The parameter {self.module} was not finite before: {self.values}",
            "input": f"It was in the batch: {self.values}",
            "forward": f"It arose in the forward of {self.module}: its inputs are finite, its output has {self.values}",
            "loss": "It arose in the loss function: all modules' outputs are finite",
            "backward": f"It arose in the backward of {self.module}: the gradient of its input has {self.values}",
        }[self.phase]
        return f"{what} (micro-step {self.micro_step}, rank {self.rank}{self.place})"


class NonFiniteSearch:
    """Search of all modules while micro-steps are repeated; keeps this rank's first finding.

    A module is reported if its result has a nan or a +inf and none of its inputs had one. (-inf alone may be a mask.) In
    backward, the module is reported whose input has the first gradient that is not finite. A compiled module counts as one.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        """Args:
        model: this rank's part.
        world: the other ranks.
        """
        self._model, self._world = model, world
        self._mine: list[Finding] = []

    @contextmanager
    def looking(self, work: Batch, micro_step: int) -> Iterator[None]:
        """Context manager around a micro-step."""
        eye = _Eye(self._model, self._world.mesh, micro_step, self._mine)
        if not self._mine:
            eye.look_at_inputs(work)
        with ExitStack() as hooks:
            if not self._mine:
                eye.hook(hooks)
            yield

    def saw_loss(self, loss: Tensor, micro_step: int) -> None:
        """Record a micro-step's loss: if it is not finite, it comes before the gradients."""
        if not torch.isfinite(loss) and (not self._mine or self._mine[0].phase == "backward"):
            self._mine[:] = [Finding.of_loss(micro_step, self._world.mesh.rank)]

    def first_of_all(self) -> Finding | None:
        """Return the earliest finding of all ranks, the same on each; all must call. Stages of a pipeline are in its order."""
        mine = self._mine
        text = json.dumps(asdict(mine[0])).encode() if mine else b""
        if len(text) > _BYTES:
            text = json.dumps(
                asdict(mine[0]) | dict(module=mine[0].module[-100:], values=mine[0].values[:100])
            ).encode()
        row = torch.zeros(1, _BYTES, dtype=torch.uint8)
        row[0, : len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        rows = all_gather(row.to(self._world.device), self._world.everyone).cpu()
        said = [bytes(line.tolist()).rstrip(b"\0") for line in rows]
        found = [Finding(**json.loads(line)) for line in said if line]
        return min(found, key=Finding.key, default=None)


class _Eye:
    """One rank's search in one micro-step."""

    def __init__(self, model: nn.Module, mesh: Mesh, micro_step: int, found: list[Finding]) -> None:
        self._model, self._found, self._order = model, found, 0
        at = {axis: index for axis, index in mesh.coordinates().items() if mesh.size(axis) > 1}
        self._common: dict[str, Any] = dict(
            micro_step=micro_step,
            rank=mesh.rank,
            place="".join(f", {axis} {index}" for axis, index in at.items()),
        )
        self._stage = mesh.index("pipe")
        self._staged = mesh.size("pipe") > 1
        self._names: dict[nn.Module, str] = {}
        self._first: Tensor | None = None  # the tensor with the first non-finite gradient

    def hook(self, hooks: ExitStack) -> None:
        """Add hooks to every module, until the stack is closed."""
        for name, module in self._model.named_modules():
            self._names[module] = _title(name, module)
            for handle in (
                module.register_forward_pre_hook(self._before, with_kwargs=True),
                module.register_forward_hook(self._after, with_kwargs=True),
            ):
                hooks.callback(handle.remove)

    def look_at_inputs(self, work: Batch) -> None:
        """Check the batch."""
        for value in tree_leaves((work.args, work.kwargs)):
            if (wrong := _wrong(value)) is not None:
                self._note("input", "", wrong)
                return

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._order += 1
        for name, parameter in module._parameters.items():
            if parameter is not None and (wrong := _wrong(parameter)) is not None:
                self._note("parameter", f"{self._names[module].partition(' (')[0]}.{name}", wrong)
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
                _ = value.grad_fn  # makes the history of a changed view: torch 2.13's register_hook crashes without
                value.register_hook(self._backward(self._names[module], value))

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._order += 1
        if any(_wrong(value) is not None for value in tree_leaves((args, kwargs))):
            return
        for value in tree_leaves(output):
            if (wrong := _wrong(value)) is not None:
                self._note("forward", self._names[module], wrong)
                return

    def _backward(self, name: str, value: Tensor) -> Any:
        def look(gradient: Tensor) -> None:
            self._order += 1
            if (wrong := _wrong(gradient, masks=False)) is None:
                return
            # If several modules take the same tensor, report the innermost: its hook was set last and runs last.
            if self._first is value and self._found and self._found[0].phase == "backward":
                self._found.clear()
            if not self._found:
                self._first = value
                self._note("backward", name, wrong)

        return look

    def _note(self, phase: str, module: str, wrong: str) -> None:
        new = Finding(phase=phase, module=module, values=wrong, order=self._order, stage=self._stage, **self._common)
        if not self._found or new.key() < self._found[0].key():
            self._found[:] = [new]


def _title(name: str, module: nn.Module) -> str:
    kind = type(module).__name__
    return f"{uncompiled_name(name)} ({kind})" if name else f"the model ({kind})"


def _wrong(value: Any, *, masks: bool = True) -> str | None:
    """Return ``3 nan, 1 inf of 4096 elements`` if a tensor has any, else None; ``masks``: ignore -inf."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_meta or not value.numel():
        return None
    value = local_shard(value.detach())  # each rank checks its own shard
    nan, inf = int(value.isnan().sum()), int((value == torch.inf).sum())
    minus = int((value == -torch.inf).sum())
    if not nan and not inf and (masks or not minus):
        return None
    parts = [f"{count} {name}" for count, name in ((nan, "nan"), (inf, "inf"), (minus, "-inf")) if count]
    return f"{', '.join(parts)} of {value.numel():,} elements"
