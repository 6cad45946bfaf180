"""An engine's states in chunks that data ranks share: the entry ``zero`` of the spec."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.engine import optimizer_state
from meshfold.engine.blocks import put
from meshfold.engine.errors import CheckpointError
from meshfold.engine.optimizers import Factory
from meshfold.engine.precision import Precision
from meshfold.engine.states import Source, held
from meshfold.engine.world import World
from meshfold.mesh import SpecError
from meshfold.mesh.metadata import placed
from meshfold.mesh.spec import ZeroSpec
from meshfold.zero_gemini import Entry, Gemini, Placing


class ZeroStates:
    """See :class:`meshfold.engine.states.States`; parameters are in chunks, buffers as they were.

    Attributes:
        gemini: holds the chunks.
    """

    all_read = True

    def __init__(
        self,
        model: nn.Module,
        world: World,
        precision: Precision,
        make: Factory | None,
        *,
        accumulation: int,
        seed: int,
        values: Callable[[str, nn.Parameter, torch.dtype], Tensor] | None,
    ) -> None:
        """Args:
        model: real or on the meta device; parameters carry their metadata.
        world: where it lies; its spec has ``zero``.
        precision: of the model.
        make: makes the optimizer.
        accumulation: micro-steps of an optimizer step.
        seed: of stochastic rounding.
        values: the first values of parameters on the meta device.
        """
        spec = world.spec.zero
        if spec is None:
            raise SpecError("this spec has no entry zero")
        elements = sum(parameter.numel() for parameter in model.parameters())
        ranks = world.data_size
        placing = place(
            spec, world.device, elements=elements, ranks=ranks, precision=precision, accumulation=accumulation
        )
        self._world, self._model = world, model
        self.gemini = Gemini(
            model,
            world.mesh,
            stage=spec.stage,
            placing=placing,
            dtype=precision.dtype,
            master_dtype=precision.master_dtype,
            gradient_dtype=gradient_dtype(precision, accumulation=accumulation, ranks=ranks),
            make_optimizer=make,
            regime=spec.regime,
            seed=seed,
            values=values,
        )
        self.optimizer = self.gemini.optimizer
        self._names = {parameter: name for name, parameter in model.named_parameters()}

    def begin(self, *, first: bool, last: bool) -> None:
        if first:
            self.gemini.forget()
        self.gemini.begin(last=last)

    def finish(self, factor: float) -> None:
        self.gemini.finish(factor)

    def norm(self) -> Tensor:
        return self.gemini.norm()

    def clip(self, max_norm: float) -> Tensor:
        return self.gemini.clip(max_norm)

    def step(self) -> None:
        self.gemini.step()

    def forget(self) -> None:
        self.gemini.forget()

    def publish(self) -> None:
        self.gemini.publish()

    def explain(self, error: BaseException) -> None:
        released = [name for name, p in self._model.named_parameters() if p.numel() == 0]
        if released:
            error.add_note(
                f"Under zero stage 3 a parameter is there while the module that holds it runs; now {len(released)} are not, such "
                f"as {released[0]}. If a module computes with a parameter of another one, move the computation into that one's "
                "forward, or tie the parameter; or use stage 2."
            )

    def close(self) -> None:
        self.gemini.close()

    def source(self, tensor: Tensor) -> Source:
        if tensor not in self._names:
            return held(tensor, tensor, self._world)
        meta = placed(tensor, self._world.mesh)
        return Source(
            dtype=self.gemini.true_dtype(tensor),
            shape=meta.placement.shape,
            read=lambda: meta.placement.gather(self.gemini.read(tensor), self._world.mesh),
        )

    def write(self, tensor: Tensor, whole: Tensor) -> None:
        if tensor in self._names:
            meta = placed(tensor, self._world.mesh)
            self.gemini.write(tensor, meta.placement.shard(whole, self._world.mesh))
        else:
            put(whole, tensor, tensor)

    def optimizer_sources(self) -> dict[str, Source]:
        found: dict[str, Source] = {}
        parameters = dict(self._model.named_parameters())
        for name, entries in self.gemini.state_entries().items():
            meta = placed(parameters[name], self._world.mesh)
            for key, entry in entries.items():
                found[f"{name}/{key}"] = Source(
                    dtype=getattr(torch, entry.dtype),
                    shape=meta.placement.shape if entry.like else (),
                    read=self._reader(name, key, entry, parameters[name]),
                )
        return found

    def _reader(self, name: str, key: str, entry: Entry, parameter: Tensor) -> Callable[[], Tensor]:
        meta = placed(parameter, self._world.mesh)

        def read() -> Tensor:
            block = self.gemini.read_state(name, key, entry)
            return meta.placement.gather(block, self._world.mesh) if entry.like else block

        return read

    def optimizer_description(self) -> dict[str, Any]:
        groups = [
            {"parameters": names, **optimizer_state.plain_settings(group)}
            for names, group in zip(self.gemini.group_names, self._made().param_groups, strict=True)
        ]
        return {"class": type(self.optimizer).__name__, "groups": groups, "values": {}}

    def load_optimizer(self, description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        optimizer = self._made()
        optimizer_state.check(optimizer, description)
        parameters = dict(self._model.named_parameters())
        self.gemini.clear_state()
        for entry in (*tensors, *description["values"]):
            name, _, key = entry.rpartition("/")
            if name not in parameters or not parameters[name].requires_grad:
                raise CheckpointError(
                    f"the checkpoint's optimizer has state of {name!r}, which is not trained here"
                )
            value = tensors[entry] if entry in tensors else torch.tensor(description["values"][entry])
            meta = placed(parameters[name], self._world.mesh)
            like = tuple(value.shape) == meta.placement.shape and value.dim() > 0
            self.gemini.write_state(
                name, key, meta.placement.shard(value, self._world.mesh) if like else value
            )
        for group, saved in zip(optimizer.param_groups, description["groups"], strict=True):
            group.update(optimizer_state.settings_of(saved))

    def _made(self) -> torch.optim.Optimizer:
        assert self.optimizer is not None  # the engine asks only then
        return self.optimizer


STATE_SHARE = 0.6
"""How much of the device's memory placement ``auto`` gives to parameters, gradients and optimizer state."""

_REGIME_BYTES = {"A": 12.0, "B": 8.0, "C": 6.03}


def gradient_dtype(precision: Precision, *, accumulation: int, ranks: int) -> torch.dtype:
    """In which gradients are summed: as the masters, unless there is nothing to sum."""
    return precision.dtype if accumulation == 1 and ranks == 1 else precision.master_dtype


def place(
    spec: ZeroSpec,
    device: torch.device,
    *,
    elements: int,
    ranks: int,
    precision: Precision,
    accumulation: int,
) -> Placing:
    """Where a spec puts a model's state.

    Placement ``auto`` keeps what fits on the device: first the optimizer state goes to the host, from the model's end
    on, then parameters. It goes by sizes alone, leaving the rest of the device's memory to activations.

    Args:
        spec: the entry.
        device: where the model computes.
        elements: of the model, on this rank.
        ranks: that share them.
        precision: of the model.
        accumulation: micro-steps of an optimizer step.

    Raises:
        SpecError: for what this version cannot do.
    """
    if spec.placement == "const":
        raise SpecError(
            "zero: placement 'const' is not in this version: write placement='auto', or placement='static' with "
            "offload_optim_frac and offload_param_frac"
        )
    if spec.offload_path is not None:
        raise SpecError(
            f"zero: offload_path={spec.offload_path!r}: the engine of this version keeps nothing on disk; leave it out, or take "
            "regime='B' or 'C' to need less"
        )
    if spec.host_memory_limit is not None:
        raise SpecError(
            f"zero: host_memory_limit={spec.host_memory_limit} bytes cannot be promised by this version: leave it out; regime='B' "
            "or 'C' take less of the host"
        )
    if spec.gpu_memory_limit is not None and spec.placement != "auto":
        raise SpecError(
            f"zero: gpu_memory_limit={spec.gpu_memory_limit} bytes with placement {spec.placement!r}: in this version the limit "
            "is what placement='auto' plans with; write that, or leave the limit out"
        )
    if spec.placement == "cpu":
        return Placing(device=device, host_parameters=1.0 if spec.stage == 3 else 0.0, host_optimizer=1.0)
    if spec.placement == "static":
        if spec.offload_param_frac and spec.stage < 3:
            raise SpecError(
                f"zero: offload_param_frac={spec.offload_param_frac} with stage={spec.stage}, which keeps all parameters on the "
                "device: write stage=3, or leave it out"
            )
        if (spec.offload_param_frac or 0.0) > (spec.offload_optim_frac or 0.0):
            raise SpecError(
                f"zero: offload_param_frac={spec.offload_param_frac} is above offload_optim_frac="
                f"{spec.offload_optim_frac or 0.0}: parameters on the host have their optimizer state there too; raise "
                "offload_optim_frac"
            )
        return Placing(
            device=device,
            host_parameters=spec.offload_param_frac or 0.0,
            host_optimizer=spec.offload_optim_frac or 0.0,
        )
    if spec.placement == "cuda":
        return Placing(device=device)
    budget = spec.gpu_memory_limit or (
        torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf
    )
    own = elements / ranks
    width = precision.dtype.itemsize
    kept = own if spec.stage == 3 else elements
    alone = gradient_dtype(precision, accumulation=accumulation, ranks=ranks) == precision.dtype
    # A gradient whose optimizer is on the host goes there as soon as it is summed; the others wait for the step.
    gradient = width if alone else precision.master_dtype.itemsize
    state = (_REGIME_BYTES[spec.regime] if precision.name == "bf16" else 2.0 * width + 8.0) - width + gradient
    free = STATE_SHARE * budget - kept * width
    if free >= own * state:
        return Placing(device=device)
    optimizer = min(1.0, 1.0 - max(free, 0.0) / (own * state))
    if free >= 0 or spec.stage < 3:
        return Placing(device=device, host_optimizer=optimizer)
    return Placing(device=device, host_optimizer=1.0, host_parameters=min(1.0, -free / (own * width)))
