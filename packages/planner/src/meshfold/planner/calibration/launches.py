"""Seconds in which this host launches operators: a tiny model trains in the engine, without norms, with them, and with experts.

Its layers are those of a real model, but so narrow that the device waits for the host. Seconds of a forward, a backward and an
optimizer's step are divided among the operators that a plan counts in them. Norms are our only kernels in it, so the seconds that
they add are theirs, while no residual sum waits for them; what the same model takes longer with sums that wait is these sums'.
Experts have an MLP's place in a fourth model; what their layers take beyond their operators and kernels is Python that routes and
sorts tokens. What the first model's forward takes longer under ``zero`` is that of its units' hooks. All models run as any model
does, with the engine's linear layers, which take more time in Python than torch's: otherwise the kernels would be charged for that.

Ranks wait for the slowest in every collective. So a model takes as long as it does on its slowest rank, and only then are its
seconds divided: the most of each rank's differences would be the noise of all of them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.engine import Engine
from meshfold.experts import MixtureOfExperts
from meshfold.kernels.fuse import fuse
from meshfold.mesh import Group, Process, all_reduce
from meshfold.mesh.model_io import BACKWARD, DryRun
from meshfold.planner.calibration.timing import Effort, wait
from meshfold.planner.clock import Work
from meshfold.planner.efficiency import Launches

_WORDS, _WIDTH, _HEAD, _TOKENS = 64, 64, 32, 32
_EXPERTS, _OF_A_TOKEN = 4, 2


class _Layer(nn.Module):
    """Attention and MLP or experts, each after a norm if there are norms, and added to the residual stream."""

    def __init__(self, *, norms: bool, experts: bool) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = (nn.LayerNorm(_WIDTH) if norms else nn.Identity() for _ in range(2))
        self.qkv, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.experts = MixtureOfExperts(_WIDTH, 2 * _WIDTH, _EXPERTS, _OF_A_TOKEN) if experts else None
        if not experts:
            self.up, self.down = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        q, k, v = self.qkv(self.before_attention(x)).view(rows, tokens, 3, -1, _HEAD).permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, tokens, _WIDTH))
        given = self.before_mlp(x)
        made: Tensor = self.down(F.gelu(self.up(given))) if self.experts is None else self.experts(given)
        return x + made


class _Model(nn.Module):
    """Layers between an embedding and a head; notes the host's seconds of its last forward."""

    def __init__(self, layers: int, *, norms: bool, experts: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(_WORDS, _WIDTH), nn.Linear(_WIDTH, _WORDS)
        self.layers = nn.ModuleList([_Layer(norms=norms, experts=experts) for _ in range(layers)])
        self.took: list[float] = []

    def forward(self, input_ids: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        begin = time.perf_counter()
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        loss = F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        self.took[:] = [time.perf_counter() - begin]
        return {"loss": loss}


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Operators of the model as plans count them.

    Attributes:
        forward: operators of a forward, without our kernels.
        backward: the same of a backward, with the engine's work on gradients.
        kernels_forward: our kernels in a forward.
        kernels_backward: the same in a backward.
        parameters: of the model.
        sums: residual sums that norms compute.
    """

    forward: int
    backward: int
    kernels_forward: int
    kernels_backward: int
    parameters: int
    sums: int = 0


@dataclass(frozen=True, kw_only=True)
class HostSeconds:
    """Seconds of the host in a micro-step, and in an optimizer's step."""

    forward: float
    backward: float
    update: float


def launches_of(plain: HostSeconds, fused: HostSeconds, without: Counts, with_kernels: Counts) -> Launches:
    """Return the launches that explain a model's seconds.

    Args:
        plain: of the model without norms, and so without our kernels.
        fused: of the model with norms, for which no sum waits.
        without: operators of the first.
        with_kernels: operators of the second; if it has no kernel, a kernel takes as long as any operator.
    """
    forward, backward = plain.forward / without.forward, plain.backward / without.backward

    def of_kernel(seconds: float, others: float, count: int, each: float) -> float:
        return max((seconds - others) / count, each / 2) if count else each  # never less than half an operator

    return Launches(
        forward=forward,
        backward=backward,
        kernel_forward=of_kernel(fused.forward, forward * with_kernels.forward, with_kernels.kernels_forward, forward),
        kernel_backward=of_kernel(
            fused.backward, backward * with_kernels.backward, with_kernels.kernels_backward, backward
        ),
        parameter=max(0.0, plain.update / without.parameters),
    )


def with_sums(found: Launches, took: HostSeconds, counts: Counts) -> Launches:
    """Return launches with those of residual sums that wait for norms: what a model took beyond its operators and kernels.

    Args:
        found: of operators and kernels.
        took: seconds of the model.
        counts: its operators.
    """
    explained = found.forward * counts.forward + found.kernel_forward * counts.kernels_forward
    return replace(found, residual=max(0.0, took.forward - explained) / counts.sums if counts.sums else 0.0)


def with_experts(found: Launches, took: HostSeconds, counts: Counts, layers: int) -> Launches:
    """Return launches with those of layers of experts: what a model of them took beyond its operators and kernels.

    Args:
        found: of operators, kernels and sums.
        took: seconds of the model.
        counts: its operators.
        layers: of it.
    """
    forward = found.forward * counts.forward + found.kernel_forward * counts.kernels_forward
    forward += found.residual * counts.sums
    backward = found.backward * counts.backward + found.kernel_backward * counts.kernels_backward
    return replace(
        found,
        experts_forward=max(0.0, took.forward - forward) / layers,
        experts_backward=max(0.0, took.backward - backward) / layers,
    )


def with_units(found: Launches, plain: HostSeconds, took: HostSeconds, units: int) -> Launches:
    """Return launches with those of units of ``zero``: what a forward takes longer under it.

    Args:
        found: of operators.
        plain: seconds of a model without ``zero``.
        took: seconds of the same model with it.
        units: of the model.
    """
    return replace(found, unit=max(0.0, took.forward - plain.forward) / units)


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """A tiny model to measure: what its layers have, whether residual sums wait for its norms, and whether it is under ``zero``."""

    norms: bool = False
    sums: bool = False
    experts: bool = False
    zero: bool = False


_KINDS = (_Kind(), _Kind(norms=True), _Kind(norms=True, sums=True), _Kind(experts=True), _Kind(zero=True))


def measure_launches(process: Process, effort: Effort, everyone: Group) -> Launches:
    """Measure the launches of the slowest rank's host. All ranks of the job must call; all return the same.

    Args:
        process: this rank.
        effort: sizes of the samples.
        everyone: all ranks.
    """
    plain, fused, summed, experts, chunked = (
        (_slowest(took, everyone, process.device), _counted_kind(effort, process, kind))
        for took, kind in zip(_measured(process, effort, _KINDS), _KINDS, strict=True)
    )
    found = with_sums(launches_of(plain[0], fused[0], plain[1], fused[1]), *summed)
    found = with_experts(found, *experts, layers=effort.layers)
    units = effort.layers + 2  # each layer, the embedding and the head
    return with_units(found, plain[0], chunked[0], units)


def _slowest(took: HostSeconds, everyone: Group, device: torch.device) -> HostSeconds:
    """Return the seconds of the rank whose host is slowest, phase by phase."""
    mine = torch.tensor([took.forward, took.backward, took.update], dtype=torch.float64, device=device)
    forward, backward, update = all_reduce(mine, everyone, op="max").tolist()
    return HostSeconds(forward=forward, backward=backward, update=update)


def _counted_kind(effort: Effort, process: Process, kind: _Kind) -> Counts:
    return counted(effort.layers, process.device.type, norms=kind.norms, sums=kind.sums, experts=kind.experts)


def _precision(device_type: str) -> str:
    return "bf16" if device_type == "cuda" else "fp32"


def _measured(process: Process, effort: Effort, kinds: Sequence[_Kind]) -> list[HostSeconds]:
    """Train the models by turns, and return the medians of the host's seconds.

    Launches are differences of the models' seconds, which are small. A host is faster at one time than at another, so each model
    makes a step in every round.
    """
    samples: list[list[HostSeconds]] = [[] for _ in kinds]
    with ExitStack() as stack:
        models = [stack.enter_context(_TinyTraining(process, effort, kind)) for kind in kinds]
        for _ in range(effort.warm_up + effort.steps):
            for model, spent in zip(models, samples, strict=True):
                spent.append(model.step())
    return [_median(spent[effort.warm_up :]) for spent in samples]


def _median(samples: Sequence[HostSeconds]) -> HostSeconds:
    """Return the medians of the seconds of each phase."""
    return HostSeconds(**{phase: median(getattr(one, phase) for one in samples) for phase in asdict(samples[0])})


class _TinyTraining:
    """A model of one kind in an engine."""

    def __init__(self, process: Process, effort: Effort, kind: _Kind) -> None:
        made: list[_Model] = []

        def build() -> _Model:
            made.append(_Model(effort.layers, norms=kind.norms, experts=kind.experts))
            return made[-1]

        device = process.device
        spec: dict[str, object] = dict(data=process.world_size) if process.world_size > 1 else dict()
        if kind.zero:
            spec["zero"] = dict(stage=1, placement="cuda") if device.type == "cuda" else dict(stage=1)
        self._device = device
        self._engine = Engine(
            build,
            parallel=spec,
            optimizer=dict(name="adamw", lr=1e-5),
            precision=_precision(device.type),
            clip_grad_norm=1.0,
            gradient_accumulation=2,
            kernels="auto" if kind.sums else dict(residual=False),
            device=device,
        )
        self._model = made[-1]
        ids = torch.zeros(process.world_size, _TOKENS, dtype=torch.int64)
        self._batch = self._engine.shard_batch(dict(input_ids=ids, labels=ids))

    def step(self) -> HostSeconds:
        """Train with two micro-steps: the seconds by which the second one is longer are the optimizer's."""
        spent = []
        for _ in range(2):
            wait(self._device)
            begin = time.perf_counter()
            self._engine.run_step(self._batch)
            whole = time.perf_counter() - begin  # the device may still compute
            spent.append((self._model.took[0], whole - self._model.took[0]))
        (forward, backward), (_, ending) = spent
        return HostSeconds(forward=forward, backward=backward, update=max(0.0, ending - backward))

    def __enter__(self) -> _TinyTraining:
        return self

    def __exit__(self, *_: object) -> None:
        wait(self._device)
        self._engine.close()


def counted(layers: int, device_type: str, *, norms: bool, sums: bool = False, experts: bool = False) -> Counts:
    """Return the model's operators on a type of device, counted on meta tensors.

    ``sums``: residual sums wait for the norms that compute them.
    """
    with torch.device("meta"):
        model = _Model(layers, norms=norms, experts=experts).to(
            torch.bfloat16 if _precision(device_type) == "bf16" else torch.float32
        )
        ids = torch.empty(1, _TOKENS, dtype=torch.int64)
    fuse(model, residual=None if sums else False)
    kind = "gpu" if device_type == "cuda" else "cpu"
    with DryRun() as stand_in, Work.counted(stand_in, kind=kind) as counter:
        model(ids, ids)["loss"].backward()
    found = [(one.phase == BACKWARD, one.ours, count) for one, count in counter.counts.items()]
    parameters = sum(1 for _ in model.parameters())
    return Counts(
        forward=sum(count for later, ours, count in found if not later and not ours),
        backward=sum(count for later, ours, count in found if later and not ours) + parameters,
        kernels_forward=sum(count for later, ours, count in found if not later and ours),
        kernels_backward=sum(count for later, ours, count in found if later and ours),
        parameters=parameters,
        sums=sum(count for one, count in counter.counts.items() if one.residual),
    )
