"""Phases of a step of alignment, and what of its models is on the GPU in each: planned from sizes, before anything is made.

    rollout        the policy's parameters and the pages of keys and values
    score          the parameters of all models
    train policy   parameters, gradients and optimizer state of the policy
    train critic   the same of the critic

What a phase works with comes first, as much of it as fits. Room that is left keeps what was there already, so that it need not
come back; the rest is on the host. Parameters that do not fit are copied to the GPU block by block while the model runs, and
optimizer state that does not is stepped on the host, as under ZeRO: slower, with the same results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshfold.mesh.spec import format_bytes
from meshfold.zero_gemini import MemoryPlanError

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class ModelState:
    """A rank's part of a model, in bytes.

    Attributes:
        name: of the model.
        parameters: what it computes with.
        state: master weights and optimizer state; 0 for a frozen model.
        gradients: while it is trained; 0 for a frozen model.
    """

    name: str
    parameters: float
    state: float = 0.0
    gradients: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PhaseUse:
    """Use of memory in a phase.

    Attributes:
        name: of the phase.
        models: whose parameters are read.
        trains: the model that is trained; None: none.
        fixed: bytes on the GPU beside models: activations, or pages of keys and values.
    """

    name: str
    models: tuple[str, ...]
    trains: str | None = None
    fixed: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PhasePlan:
    """Placement in a phase.

    Attributes:
        use: what it works with.
        parameters: by model, the share of its parameters on the GPU.
        state: the same of its optimizer state.
        gpu_bytes: peak of the GPU: models, gradients, and what is fixed.
        host_bytes: of models on the host.
        in_bytes: copied to the GPU when the phase begins.
        out_bytes: copied to the host.
    """

    use: PhaseUse
    parameters: Mapping[str, float]
    state: Mapping[str, float]
    gpu_bytes: float
    host_bytes: float
    in_bytes: float = 0.0
    out_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Placements in all phases of a step; ``str()`` is a table.

    Attributes:
        phases: in order.
        models: whose state it places.
        gpu: limit of a rank's GPU in bytes.
        host: limit of its part of the host's memory; None: none.
    """

    phases: tuple[PhasePlan, ...]
    models: tuple[ModelState, ...]
    gpu: float
    host: float | None = None

    def __getitem__(self, name: str) -> PhasePlan:
        return next(phase for phase in self.phases if phase.use.name == name)

    def __str__(self) -> str:
        width = max(len(phase.use.name) for phase in self.phases)
        limit = "" if self.host is None else f" of {self.host / GIB:.1f}"
        lines = [f"{'phase':{width}}  {'GPU GiB':>16}  {'host GiB':>16}  {'to GPU':>7}  {'to host':>7}  on the host"]
        for phase in self.phases:
            away = [f"{share:.0%} of {name}'s {what}" for name, what, share in self._away(phase)]
            lines.append(
                f"{phase.use.name:{width}}  {f'{phase.gpu_bytes / GIB:.1f} of {self.gpu / GIB:.1f}':>16}  "
                f"{f'{phase.host_bytes / GIB:.1f}{limit}':>16}  {phase.in_bytes / GIB:7.1f}  {phase.out_bytes / GIB:7.1f}  "
                f"{', '.join(away) or 'nothing'}"
            )
        return "\n".join(line.rstrip() for line in lines)

    def _away(self, phase: PhasePlan) -> list[tuple[str, str, float]]:
        found = []
        for model in self.models:
            for what, shares, nbytes in (
                ("parameters", phase.parameters, model.parameters),
                ("optimizer state", phase.state, model.state),
            ):
                if nbytes and shares[model.name] < 1.0:
                    found.append((model.name, what, 1.0 - shares[model.name]))
        return found


def phases_of(
    *, trained: Sequence[str], frozen: Sequence[str], rolls_out: bool, pages: float = 0.0, activations: float = 0.0
) -> list[PhaseUse]:
    """Return the phases of a trainer: rollout of the first trained model, scores of all, training of one by one.

    Args:
        trained: models with an optimizer, the policy first.
        frozen: models that only score.
        rolls_out: the policy samples, by itself.
        pages: bytes of keys and values while it does.
        activations: bytes of a forward and backward; scoring is taken to need them too.
    """
    found = [PhaseUse(name="rollout", models=(trained[0],), fixed=pages)] if rolls_out else []
    if frozen or rolls_out:
        found.append(PhaseUse(name="score", models=(*trained, *frozen), fixed=activations))
    found += [PhaseUse(name=f"train {name}", models=(name,), trains=name, fixed=activations) for name in trained]
    return found


@dataclass
class _Room:
    """Room of a GPU while a phase is laid out."""

    left: float
    shares: dict[tuple[str, str], float] = field(default_factory=dict)

    def take(self, name: str, what: str, nbytes: float, most: float = 1.0) -> None:
        """Put as much of something on the GPU as fits, a share of ``most`` at most."""
        share = most if nbytes == 0 else max(0.0, min(most, self.left / nbytes))
        self.shares[name, what] = share
        self.left -= share * nbytes


def plan_phases(
    models: Sequence[ModelState], uses: Sequence[PhaseUse], *, gpu: float, host: float | None = None
) -> Plan:
    """Return where state is in each phase.

    Args:
        models: all of them.
        uses: the phases, in order; after the last comes the first again.
        gpu: bytes of the GPU that may be used.
        host: bytes of the host, for this rank; None: no limit.

    Raises:
        MemoryPlanError: if a phase fits nowhere; it says the least that would do.
    """
    by_name = {model.name: model for model in models}
    laid = [_laid_out(by_name, use, gpu) for use in uses]
    found = []
    for place, (use, shares) in enumerate(zip(uses, laid, strict=True)):
        before = laid[place - 1]
        on_gpu = use.fixed
        on_host = came = left = 0.0
        for model in models:
            for what, nbytes in (("parameters", model.parameters), ("state", model.state)):
                share, was = shares[model.name, what], before[model.name, what]
                # A gradient is where its state is, while it exists.
                whole = nbytes + (model.gradients if what == "state" and use.trains == model.name else 0.0)
                on_gpu, on_host = on_gpu + share * whole, on_host + (1.0 - share) * whole
                came, left = came + max(share - was, 0.0) * nbytes, left + max(was - share, 0.0) * nbytes
        if use.fixed > gpu or (host is not None and on_host > host * (1 + 1e-9)):
            short = max(use.fixed - gpu, 0.0) if host is None else max(use.fixed - gpu, on_host - host)
            raise MemoryPlanError(
                f"phase {use.name!r} needs {format_bytes(on_gpu)} of the GPU and {format_bytes(on_host)} of the host, with "
                f"{format_bytes(gpu)} and {'no limit' if host is None else format_bytes(host)} to use: {format_bytes(short)} are "
                "missing. Use regime 'B' or 'C' in zero, more ranks, adapters (whose base is the reference), or fewer tokens a part"
            )
        found.append(
            PhasePlan(
                use=use,
                parameters={model.name: shares[model.name, "parameters"] for model in models},
                state={model.name: shares[model.name, "state"] for model in models},
                gpu_bytes=on_gpu,
                host_bytes=on_host,
                in_bytes=came,
                out_bytes=left,
            )
        )
    return Plan(phases=tuple(found), models=tuple(models), gpu=gpu, host=host)


def _laid_out(models: Mapping[str, ModelState], use: PhaseUse, gpu: float) -> dict[tuple[str, str], float]:
    """Return the shares on the GPU in a phase, by model and kind: what it works with, then the rest in the models' order."""
    room = _Room(left=gpu - use.fixed)
    for name in use.models:
        room.take(name, "parameters", models[name].parameters)
    if use.trains is not None:
        model = models[use.trains]
        room.take(use.trains, "state", model.state + model.gradients, room.shares[use.trains, "parameters"])
    for name, model in models.items():
        if (name, "parameters") not in room.shares:
            room.take(name, "parameters", model.parameters)
    for name, model in models.items():
        if (name, "state") not in room.shares:
            # State on the GPU has its parameters there.
            room.take(name, "state", model.state, room.shares[name, "parameters"])
    return room.shares
