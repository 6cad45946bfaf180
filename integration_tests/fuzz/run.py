"""How a case is trained: on ranks by an engine, and in one process by a plain loop in float64."""

from __future__ import annotations

import functools
import math
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from integration_tests.fuzz.cases import Case
from integration_tests.fuzz.models import Model, build, dropping, hugging_face
from meshfold.engine import Engine
from meshfold.mesh import MeshfoldError, all_reduce

State = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a training gave.

    Attributes:
        losses: one a micro-step.
        norms: of the gradient before clipping, one a step; None where there was no clipping by norm.
        assessed: the loss of the first batch at the end, without training.
        state: the whole model's at the end.
        first: the whole model's at the start.
    """

    losses: list[float]
    norms: list[float | None]
    assessed: float
    state: State
    first: State


@dataclass(frozen=True, kw_only=True)
class Refused:
    """An error of the library's own.

    Attributes:
        kind: its type.
        text: its message.
        where: ``engine`` (while it was made), ``step 1`` and so on, ``save``, ``load``, ``state``.
        steps: of the optimizer until then.
        harmed: what is wrong with the model afterwards; empty: nothing.
    """

    kind: str
    text: str
    where: str
    steps: int
    harmed: str = ""


@dataclass(frozen=True, kw_only=True)
class Raised:
    """Any other error: what a user should never see."""

    kind: str
    text: str
    where: str
    traceback: str = field(repr=False)


# -- batches and losses -------------------------------------------------------------------------------------------


def batches(case: Case) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of every micro-step, of both trainings."""
    of, generator = case.model, torch.Generator().manual_seed(case.seed + 7)
    found = []
    for _ in range(case.steps * case.accumulation * (1 if case.then is None else 2)):
        inputs = _inputs(case, generator)
        tokens = inputs.shape[1] if of["input"] in ("ids", "frames") else int(of["tokens"])
        shape = (case.rows,) if of.get("pool") or of["input"] == "features" else (case.rows, tokens)
        if of.get("family") is None and of.get("head") is None:
            targets = torch.randn(*shape, int(of["hidden"]), generator=generator, dtype=torch.float64)
        else:
            targets = torch.randint(int(of["vocab"]), shape, generator=generator)
            if case.ignored and len(shape) == 2 and of.get("loss") != "ignore_index":
                targets = targets.masked_fill(torch.rand(shape, generator=generator) < case.ignored, -100)
                targets[0, -1] = 1  # a mean over nothing is nan
        found.append((inputs, targets))
    return found


def _inputs(case: Case, generator: torch.Generator) -> Tensor:
    of = case.model
    if of["input"] == "ids":
        return torch.randint(int(of["vocab"]), (case.rows, int(of["tokens"])), generator=generator)
    shape = {
        "image": (case.rows, 3, 4, 4),
        "picture": (case.rows, 3, 4, 4),
        "frames": (case.rows, of["tokens"], of.get("features", 0)),
        "features": (case.rows, of.get("features", 0)),
    }[of["input"]]
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def makes_loss(case: Case) -> bool:
    """Whether the model's output has its loss."""
    return case.model.get("out") in ("loss", "dict loss")


def loss_fn(output: Any, batch: Any, how: str | None = None) -> Tensor:
    """The mean over targets that count; ``how``: with another index that does not, or a weight for each class."""
    targets = batch[1]
    if isinstance(output, tuple):
        output = output[0]
    if isinstance(output, dict):
        output = output["logits"]
    if targets.is_floating_point():
        return (output - targets).square().mean()  # type: ignore[no-any-return]
    rest: dict[str, Any] = {}
    if how == "ignore_index":
        rest["ignore_index"] = 0
    if how == "weights":
        rest["weight"] = torch.linspace(0.5, 1.5, output.shape[-1], dtype=output.dtype)
    found: Tensor = F.cross_entropy(output.reshape(-1, output.shape[-1]), targets.reshape(-1), **rest)
    return found


def loss_of(case: Case) -> Callable[[Any, Any], Tensor]:
    """What a user gives the engine."""
    how = case.model.get("loss")
    return loss_fn if how is None else lambda output, batch: loss_fn(output, batch, how)


def given(case: Case, pair: tuple[Tensor, Tensor]) -> Any:
    """A batch as the engine takes it."""
    return dict(input_ids=pair[0], labels=pair[1]) if makes_loss(case) else pair


def serial_loss(case: Case, model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
    """The same loss of a plain call."""
    if not makes_loss(case):
        return loss_of(case)(model(pair[0]), pair)
    output = model(input_ids=pair[0], labels=pair[1])
    if case.model.get("family"):  # its own loss is in float32
        logits = output.logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), pair[1][:, 1:].flatten())
    return output["loss"] if isinstance(output, dict) else output.loss  # type: ignore[no-any-return]


# -- in one process -----------------------------------------------------------------------------------------------

CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": torch.optim.RMSprop,
    "Adadelta": torch.optim.Adadelta,
}


def _optimizer(case: Case, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    rest = dict(case.optimizer)
    cls, spared = CLASSES[rest.pop("name")], rest.pop("no_decay", None)
    groups: list[dict[str, Any]] = [dict(params=parameters)]
    if spared:
        groups = [
            dict(params=[p for p in parameters if p.dim() > 1]),
            dict(params=[p for p in parameters if p.dim() <= 1], weight_decay=0.0),
        ]
    made: torch.optim.Optimizer = cls(groups, **rest)
    return made


def halve(optimizer: torch.optim.Optimizer) -> Any:
    """The learning rate falls by half each step."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def serial(case: Case, first: State | None = None) -> Trained:
    """The plain loop; ``first``: the weights that it starts from, instead of the model's own."""
    model = build(described(case), case.seed)
    if first is not None:
        model.load_state_dict(first)
    start = _copy(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = _optimizer(case, trained)
    scheduler = halve(optimizer) if case.scheduler else None
    losses, norms = [], []
    every = batches(case)
    for number, pair in enumerate(every):
        loss = serial_loss(case, model.train(), pair)
        (loss / case.accumulation).backward()
        losses.append(float(loss.detach()))
        if (number + 1) % case.accumulation:
            continue
        norms.append(_clip(case, trained))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
    with torch.no_grad():
        assessed = float(serial_loss(case, model.eval(), every[0]))
    return Trained(losses=losses, norms=norms, assessed=assessed, state=_copy(model), first=start)


def _clip(case: Case, trained: list[nn.Parameter]) -> float | None:
    clip = dict(case.clip)
    if "clip_grad_value" in clip:
        torch.nn.utils.clip_grad_value_(trained, clip["clip_grad_value"])
    if "clip_grad_norm" in clip:
        kind = float(clip.get("clip_norm_type", 2.0))
        return float(torch.nn.utils.clip_grad_norm_(trained, clip["clip_grad_norm"], kind))
    return None


def _copy(model: nn.Module) -> State:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


# -- on ranks -----------------------------------------------------------------------------------------------------


def engine_of(case: Case, spec: dict[str, Any], model: nn.Module | Callable[[], nn.Module]) -> Engine:
    """The engine, as a user would make it."""
    optimizer = dict(case.optimizer)
    if optimizer["name"][0].isupper():
        optimizer["name"] = CLASSES[optimizer["name"]]
    clip = dict(case.clip)
    if clip.get("clip_norm_type") == "inf":
        clip["clip_norm_type"] = math.inf
    first = batches(case)[0] if "pipeline" in spec and case.model["input"] != "ids" else None
    return Engine(
        model,
        spec,
        optimizer=optimizer,
        precision="fp64",
        gradient_accumulation=case.accumulation,
        loss_fn=None if makes_loss(case) else loss_of(case),
        lr_scheduler=halve if case.scheduler else None,
        recompute=case.recompute,
        seed=case.seed,
        rules=rules_for(case, spec) or None,
        example=first,
        watchdog=90,
        **clip,
    )


def rules_for(case: Case, spec: dict[str, Any]) -> dict[str, str]:
    """Rules that keep whole what no mode of tensor parallelism knows."""
    if not case.rules or "tensor" not in spec:
        return {}
    kept = (
        "Recurrent",
        "TokenConv",
        "OneLinear",
        "OwnParameters",
        "Experts",
        "Adapted",
        "Counted",
        "HandNorm",
    )
    model = build(described(case), case.seed)
    found = {name: "replicate" for name, module in model.named_modules() if type(module).__name__ in kept}
    return {name: role for name, role in found.items() if not any(name.startswith(f"{o}.") for o in found if o != name)}


def _builder(case: Case) -> Callable[[], nn.Module]:
    return functools.partial(build_fresh, case)


def build_fresh(case: Case) -> nn.Module:
    """The model as a function makes it: without a seed of its own."""
    return hugging_face(case.model) if case.model.get("family") else Model(described(case))


def described(case: Case) -> dict[str, Any]:
    """The model's description, with what it drops."""
    return dict(dropping(case.model, case.dropout)) if case.dropout and case.model.get("blocks") else case.model


def first_state(case: Case) -> State:
    """The weights that a function's model starts from: those of one process under no spec."""
    with Engine(_builder(case), {}, seed=case.seed, precision="fp64", loss_fn=loss_fn) as engine:
        return {name: value.clone() for name, value in engine.full_state_dict().items()}


def alone(case: Case) -> Trained:
    """All of a case by an engine in one process, under no spec: what dropout is compared with.

    Raises:
        MeshfoldError: where it cannot be told which elements drop.
    """
    model: Any = _builder(case) if case.made == "function" else build(described(case), case.seed)
    with engine_of(case, {}, model) as engine:
        if engine.report is None:
            raise MeshfoldError("torch's own dropout falls otherwise on each rank")
        first = {name: value.clone() for name, value in engine.full_state_dict().items()}
        losses, norms, every = [], [], batches(case)
        for pair in every:
            done = engine.steps
            losses.append(step(case, engine, pair))
            if engine.last is not None and engine.steps > done:
                norms.append(engine.last.grad_norm if "clip_grad_norm" in case.clip else None)
        assessed = engine.eval_step(given(case, every[0]))
        return Trained(losses=losses, norms=norms, assessed=assessed, state=engine.full_state_dict(), first=first)


def step(case: Case, engine: Engine, pair: tuple[Tensor, Tensor]) -> float:
    """A micro-step; its loss over the global batch."""
    batch = engine.shard_batch(given(case, pair))
    if case.loop == "train_step":
        return engine.train_step(batch)
    if makes_loss(case):
        output = engine(**batch)
        loss = output["loss"] if isinstance(output, dict) else output.loss
    else:
        loss = loss_of(case)(engine(batch[0]), batch)
    engine.backward(loss / case.accumulation)
    if engine.micro_step % case.accumulation == 0:
        engine.step()
    return float(mean_of_ranks(engine, loss))


def mean_of_ranks(engine: Engine, loss: Tensor) -> Tensor:
    """Of the data ranks, which have equally many rows."""
    return all_reduce(loss.detach().double(), engine.mesh.group("data")) / engine.mesh.size("data")


def train(case: Case, folder: str, half: int) -> Trained | Refused | Raised:
    """One half of the case on this rank: the training, or what goes on from its checkpoint under the other spec."""
    where, engine, kept = "engine", None, None
    spec = case.spec if half == 0 else case.then or {}
    try:
        model: Any = _builder(case) if case.made == "function" else build(described(case), case.seed)
        kept = _copy(model) if isinstance(model, nn.Module) else None
        engine = engine_of(case, spec, model)
        where = "state"
        first = engine.full_state_dict()
        if half == 1:
            where = "load"
            engine.load(folder)
        losses, norms, every = [], [], batches(case)
        count = case.steps * case.accumulation
        for number in range(half * count, (half + 1) * count):
            where = f"step {number + 1}"
            done = engine.steps
            losses.append(step(case, engine, every[number]))
            if engine.last is not None and engine.steps > done:
                norms.append(engine.last.grad_norm if "clip_grad_norm" in case.clip else None)
        where = "eval"
        assessed = engine.eval_step(engine.shard_batch(given(case, every[0])))
        where = "state"
        state = engine.full_state_dict()
        if half == 0 and case.then is not None:
            where = "save"
            engine.save(folder)
        where = "close"
        engine.close()
        left = children()
        if left:
            return Raised(kind="LeftOver", text=f"processes left: {left}", where=where, traceback="")
        return Trained(losses=losses, norms=norms, assessed=assessed, state=state, first=first)
    except MeshfoldError as error:
        steps = 0 if engine is None else engine.steps
        if engine is not None:
            LEFT[:] = [engine]
        harmed = "" if kept is None or engine is not None else changed(model, kept)
        return Refused(kind=type(error).__name__, text=str(error), where=where, steps=steps, harmed=harmed)
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        return Raised(kind=type(error).__name__, text=str(error), where=where, traceback=text[-6000:])


LEFT: list[Engine] = []
"""The engine of a case that was refused in a step, for :func:`after_refusal`."""


def after_refusal() -> State:
    """The whole state of a model of which a step was refused; all ranks must call."""
    with LEFT.pop() as engine:
        return {name: value.clone() for name, value in engine.full_state_dict().items()}


def changed(model: nn.Module, before: State) -> str:
    """What is another in a model than it was."""
    after = model.state_dict()
    if list(after) != list(before):
        return f"names: {sorted(set(after) ^ set(before))[:4]}"
    for name, value in before.items():
        if after[name].shape != value.shape or not torch.equal(after[name].to(value.dtype), value):
            return f"{name} of shape {tuple(value.shape)} is now {tuple(after[name].shape)}"
    return ""


def children() -> list[int]:
    """Processes that this one has started and not ended."""
    here = Path(f"/proc/{os.getpid()}/task")
    if not here.exists():
        return []
    return [int(pid) for task in here.iterdir() for pid in (task / "children").read_text().split()]


def timed(case: Case, folder: str, half: int) -> tuple[Trained | Refused | Raised, float]:
    """:func:`train`, and how many seconds it took."""
    start = time.perf_counter()
    text = train(case, folder, half)
    return text, time.perf_counter() - start
