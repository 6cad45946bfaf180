"""Checks of an engine's model before anything starts: errors for what cannot be trained, and warnings about what computes
different numbers on several ranks than on one."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from meshfold.engine.errors import TrainingError
from meshfold.engine.precision import Precision
from meshfold.engine.world import World
from meshfold.mesh import SpecError, all_reduce, metadata
from meshfold.mesh.parameters import metadata_on, uncompiled_name
from meshfold.mesh.spec import argument_checks as settings


def refuse_unmade(model: nn.Module) -> None:
    """Raise a SpecError for layers whose parameters have no shape yet, and for a traced module, which cannot be called by name."""
    for name, module in model.named_modules():
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():  # type: ignore[misc]
            raise SpecError(
                f"{name or 'the model'} is a {type(module).__name__}, whose parameters have no shape before its first call: call "
                "the model once on a small batch before you give it to Engine, or write the layer with its sizes "
                "(nn.Linear(8, 16) for nn.LazyLinear(16))"
            )
    if isinstance(model, torch.jit.ScriptModule) and type(model).__name__ == "TopLevelTracedModule":
        raise SpecError(
            "the model is traced (torch.jit.trace), so its Python code is gone: give the nn.Module that "
            "was traced, or torch.compile it"
        )


def refuse_layers(model: nn.Module, world: World, precision: Precision) -> None:
    """Raise a SpecError for layers that would not compute the same under this spec as in a plain loop."""
    spec = world.spec
    hooked = next((e for e in ("zero", "tensor", "pipeline", "sequence", "axial") if getattr(spec, e) is not None), "")
    for name, module in model.named_modules():
        if hooked and isinstance(module, torch.jit.ScriptModule):
            raise SpecError(
                f"{name or 'the model'} is traced or scripted (torch.jit), which takes no hooks and cannot be split, so it does "
                f"not work with {hooked}: give the nn.Module that it was made from, or torch.compile it"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            _refuse_table(name or "the model", module, world, precision)
            _refuse_tied_table(name or "the model", module, model, world)


def _refuse_table(name: str, table: nn.Embedding | nn.EmbeddingBag, world: World, precision: Precision) -> None:
    """Raise a SpecError for options of a table that act on the words of one rank's batch."""
    kind, written = type(table).__name__, world.spec.written or str(world.spec)
    if table.sparse:
        raise SpecError(
            f"{name}: nn.{kind}(sparse=True) has sparse gradients, but the engine sums, clips and steps with "
            "dense ones: leave sparse out"
        )
    several = world.data_size > 1 or world.spec.zero is not None
    if table.max_norm is not None and (several or precision.dtype != precision.master_dtype):
        where = written if several else f"precision={precision.name!r}"
        raise SpecError(
            f"{name}: nn.{kind}(max_norm={table.max_norm}) rescales the rows that a forward reads, in the weights that the "
            f"model computes with; under {where} every rank would rescale other rows, or not the trained weights. Leave "
            "max_norm out, and normalise the table's output if needed"
        )
    if table.scale_grad_by_freq and (world.data_size > 1 or world.pipelined):
        raise SpecError(
            f"{name}: nn.{kind}(scale_grad_by_freq=True) divides gradients by how often a word occurs in the batch, and under "
            f"{written} a rank counts only the words of its own part of the batch: leave scale_grad_by_freq out"
        )


def _refuse_tied_table(name: str, table: nn.Embedding | nn.EmbeddingBag, model: nn.Module, world: World) -> None:
    """Raise a SpecError for a table if another stage has a copy that a forward does not rescale."""
    if table.max_norm is None or not world.pipelined:
        return
    holders = sum(p is table.weight for module in model.modules() for p in module._parameters.values())
    if holders > 1:
        raise SpecError(
            f"{name}: nn.{type(table).__name__}(max_norm={table.max_norm}) rescales the rows that a forward reads, and another "
            f"layer shares its weight; under {world.spec.written or world.spec} that layer would compute with rows that are not "
            "rescaled yet. Leave max_norm out, or do not share the weight"
        )


def refuse_complex(model: nn.Module) -> None:
    """Raise a SpecError for a complex parameter: a precision would keep only its real part."""
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise SpecError(
                f"parameter {name!r} is {parameter.dtype}, but precisions are real: keep its real and imaginary "
                "parts (torch.view_as_real) as a parameter, and combine them in forward (torch.view_as_complex)"
            )


def refuse_empty(model: nn.Module, world: World) -> None:
    """Raise a SpecError for a parameter without elements, which no chunk can hold."""
    for name, parameter in model.named_parameters():
        shape = metadata_on(parameter, world.mesh).placement.shape
        if 0 in shape:
            raise SpecError(
                f"zero: parameter {uncompiled_name(name)!r} of shape {tuple(shape)} has no elements to shard: "
                "leave it out of the model, or register it as a buffer"
            )


def require_trained(model: nn.Module, count: int, world: World) -> None:
    """Raise a SpecError if no stage has trained parameters; a single stage may have none.

    Args:
        model: this rank's part.
        count: of its parameters that are trained.
        world: all ranks of a pipeline must call.
    """
    if world.pipelined and world.device.type != "meta":
        count = int(all_reduce(torch.tensor(count, device=world.device), world.pipe_group))
    if count == 0:
        there = next(model.parameters(), None) is not None
        why = (
            "all are frozen (requires_grad=False): unfreeze some"
            if there
            else "there are none: give a model that has some"
        )
        raise SpecError(
            f"an optimizer, and no parameter of {type(model).__name__} is to be trained: {why}, or leave optimizer out, for "
            "evaluation only"
        )


class KnownParameters:
    """The parameters that an engine was made with: only these have a gradient's buffer and optimizer state, if not frozen."""

    def __init__(self, model: nn.Module) -> None:
        """Args:
        model: this rank's part, when the engine is made.
        """
        named = dict(model.named_parameters())
        self._model, self._forwards = model, 0
        self._frozen = [(name, p) for name, p in named.items() if not p.requires_grad]
        self._known = {id(p): p.dtype for p in named.values()}

    def check(self) -> None:
        """Check that those frozen still are, and, in forwards 1, 2, 4, 8, ..., that there are no others and none was cast.

        Raises:
            TrainingError: for one that the optimizer would not step, and one of another dtype.
        """
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise TrainingError(
                    f"{uncompiled_name(name)} is to be trained now (requires_grad=True), but was frozen when the engine was made, "
                    "which has no optimizer state for it. Make the engine while everything that will be trained has "
                    "requires_grad=True, and freeze after that what waits; or make another engine, after close() of this one"
                )
        self._forwards += 1
        if self._forwards & (self._forwards - 1) == 0:  # seldom: it visits every module
            self._look()

    def _look(self) -> None:
        """Raise a TrainingError for a parameter that came after the engine was made, or that was cast since."""
        for name, parameter in self._model.named_parameters():
            before = self._known.get(id(parameter))
            if before is None and parameter.requires_grad:
                raise TrainingError(
                    f"{uncompiled_name(name)} was put into the model after the engine was made, and no optimizer would step it: "
                    "change the model first and then write Engine(model, ...), or make another engine, after close() of this one"
                )
            if before not in (None, parameter.dtype):
                raise TrainingError(
                    f"{uncompiled_name(name)} was {_short(before)} when the engine was made, and is {_short(parameter.dtype)}: do "
                    f"not cast engine.model, write Engine(..., precision='bf16') or another precision"
                )


def _short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


class NoCopies:
    """Makes deep copies of a model raise a clear error if its parameters are empty or absent, and ``state_dict`` if they are empty.

    They are absent in a pipeline, and empty while ZeRO stage 3 shards them.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        """Args:
        model: this rank's part; every module of it is marked.
        world: where it lies.
        """
        zero = world.spec.zero
        refuse = _no_copy_of_shards if zero is not None and zero.stage == 3 else _no_copy_of_stages
        self._modules = list(model.modules()) if refuse is _no_copy_of_shards or world.pipelined else []
        for module in self._modules:
            module.__dict__["__deepcopy__"] = refuse
        self._handles = []
        for module in self._modules if refuse is _no_copy_of_shards else ():
            if any(parameter is not None for parameter in module._parameters.values()):
                self._handles.append(module.register_state_dict_pre_hook(_no_state_of_shards))
                self._handles.append(module.register_load_state_dict_pre_hook(_no_state_into_shards))

    def close(self) -> None:
        """Allow copies again."""
        for handle in self._handles:
            handle.remove()
        for module in self._modules:
            module.__dict__.pop("__deepcopy__", None)


_INSTEAD = "Copy the model before it is given to Engine, or load engine.full_state_dict() into a new one"


def _no_copy_of_shards(memo: object) -> nn.Module:
    raise TrainingError(
        "copy.deepcopy of a model under zero=dict(stage=3): its parameters are empty between uses, and the copy's would "
        f"be empty too. {_INSTEAD}"
    )


def _no_state_of_shards(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if not keep_vars:  # else the parameters themselves are asked for, not their values
        _no_state_into_shards(module)


def _no_state_into_shards(module: nn.Module, *rest: Any) -> None:
    if any(parameter is not None and parameter.shape.numel() == 0 for parameter in module._parameters.values()):
        raise TrainingError(
            f"state_dict() or load_state_dict() of a model under zero=dict(stage=3): parameters are empty between uses, now those "
            f"of a {type(module).__name__}. Call engine.full_state_dict() or engine.load_state_dict(state) on all ranks"
        )


def _no_copy_of_stages(memo: object) -> nn.Module:
    raise TrainingError(
        f"copy.deepcopy of a model in a pipeline: this rank has only the layers of its own stages. {_INSTEAD}"
    )


# By name: importing the wrappers takes longer than importing this library.
_WRAPPERS = {
    "DataParallel",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "FSDPModule",
    "DeepSpeedEngine",
}


def check_model(model: object) -> None:
    """Check that a model is an unwrapped module, or a function that makes one, as far as possible before the call.

    Raises:
        SpecError: if it is neither, is wrapped by another library, is the remainder of an engine's model, or requires arguments.
    """
    if isinstance(model, nn.Module):
        wrapper = next((cls.__name__ for cls in type(model).__mro__ if cls.__name__ in _WRAPPERS), None)
        if wrapper is not None:
            raise SpecError(
                f"the model is already a {wrapper}, which sums gradients itself: give the module inside it "
                "(model.module), and let parallel=dict(data=...) do that"
            )
        partial = next((name for name, parameter in model.named_parameters() if _is_partial(parameter)), None)
        if partial is not None:
            raise SpecError(
                f"model={type(model).__name__}(...): an earlier engine has left only a part of it on this rank; {partial!r} is "
                "not whole. Build the model again, with the weights of engine.full_state_dict() before close(), or of a checkpoint"
            )
        return
    if not callable(model):
        raise SpecError(f"model={model!r}: give an nn.Module, or a function without arguments that makes one")
    signature = settings.signature_mismatch(model)
    if signature is not None:
        name = getattr(model, "__name__", type(model).__name__)
        raise SpecError(f"model={name} is called without arguments, but takes {signature}: write lambda: {name}(...)")


def _is_partial(parameter: nn.Parameter) -> bool:
    """Return True if a parameter is what an earlier engine left: in released chunks, a shard on a closed mesh, or of one stage."""
    meta = metadata(parameter)
    if meta is None:
        return False
    gone = parameter.shape.numel() == 0 and 0 not in meta.placement.shape
    split = meta.mesh.is_closed and meta.mesh.size(*meta.placement.split_axes) > 1
    return gone or split or meta.mesh.size(*meta.only_at) > 1


_BALANCE = re.compile(r"(router_)?aux(iliary)?_loss.*|router_z_loss.*|(load_)?balanc\w*_(loss|coef|weight)\w*")
"""Names of coefficients of a mixture of experts' own loss."""


def warn_of_split_batches(model: nn.Module, world: World) -> None:
    """Warn once, on rank 0, about batch norms and balance losses that see only a part of the batch.

    Args:
        model: the whole model, before it is split.
        world: where it will lie.
    """
    if world.mesh.rank != 0 or not (world.data_size > 1 or world.pipelined):
        return
    parts = "micro-batch" if world.data_size == 1 else "data rank"
    for note in (_batch_norms(model, parts), _balance_losses(model, parts)):
        if note:
            warnings.warn(note, stacklevel=2)


def _batch_norms(model: nn.Module, parts: str) -> str:
    found = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
    ]
    if not found:
        return ""
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return (
        f"{found[0]}{more}: a batch norm computes mean and variance from the rows of its own {parts}, not of the global batch, as "
        "under torch's DistributedDataParallel; losses differ from those of one process. nn.GroupNorm and nn.LayerNorm have no "
        "such statistics"
    )


def _balance_losses(model: nn.Module, parts: str) -> str:
    found = next(_coefficients(model), None)
    if found is None:
        return ""
    name, value = found
    return (
        f"{name}={value}: a mixture of experts' own balance loss is computed from each {parts}'s tokens and then averaged; it is "
        "not a mean over tokens, so it differs a little from that of the global batch. The rest of the loss does not"
    )


def _coefficients(model: nn.Module) -> Iterator[tuple[str, float]]:
    """Yield the name and value of each coefficient of a balance loss that the model computes."""
    for place in (getattr(model, "config", None), *model.modules()):
        config = getattr(place, "config", place)
        if getattr(config, "output_router_logits", True) is False:  # models of transformers then compute none
            continue
        for name, value in getattr(place, "__dict__", {}).items():
            if _BALANCE.fullmatch(name) and isinstance(value, float) and value > 0:
                yield name, value
