"""Initial weights by global element: a model is built on the meta device, and each rank fills its own blocks.

    model, trace = build_on_meta(lambda: GPT(config))
    materialize(model, trace, seed=0, device="cpu", placement_of=...)

The trace holds the operations that the model's own code initialises its parameters with. They are replayed on the elements that a
rank holds, with random numbers that belong to (seed, parameter name, global element). Every split gives the same model, with the
same distribution as one that was built without Meshfold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from meshfold.mesh.errors import MeshfoldError
from meshfold.mesh.initialization.replay import Replay, take_block
from meshfold.mesh.initialization.trace import Reader, Recorder, noting_truncated_normal
from meshfold.mesh.initialization.writes import Recording, Ref, Write
from meshfold.mesh.parameters.parameter_meta import copy_parameter_hooks, uncompiled_name
from meshfold.mesh.random.numbers import key_of

Module = TypeVar("Module", bound=nn.Module)
PlacementOf = Callable[[str, Tensor], Sequence[Tensor] | None]

_ADVICE = "build the model in the plain way, on a real device, and pass that instead"


class InitTrace:
    """Record of how the parameters and buffers of a model get their values.

    Made by `record_initialization` or `build_on_meta`.
    """

    def __init__(self) -> None:
        self.recording = Recording()
        self._names: dict[str, Ref] = {}
        self._keys: dict[Write, int] = {}

    def bind(self, model: nn.Module) -> None:
        """Give random numbers their keys: `key_of` the name of the parameter they are for.

        A second draw into the same parameter has the key of ``name#1``, and so on. What `torch.compile` adds to names is
        ignored: a model draws the same numbers however it is run.
        `build_on_meta` and `materialize` do this. Binding again, after modules were renamed, changes nothing that
        was bound before.
        """
        tensors = dict(_named_tensors(model))
        fresh = {
            name: self.recording.ref(tensor)
            for name, tensor in tensors.items()
            if self.recording.knows(tensor) and name not in self._names
        }
        self._names.update(fresh)
        owners: dict[int, str] = {}
        for name, ref in fresh.items():
            owners.setdefault(ref.storage, name)
        draws: dict[str, int] = {}
        for deep in (False, True):  # a parameter's own draws come before its inputs' draws
            for name, ref in fresh.items():
                for storage, write in self._draws(ref, set(), deep=deep):
                    if write not in self._keys:
                        owner = uncompiled_name(owners.get(storage, name))
                        count = draws.get(owner, 0)
                        draws[owner] = count + 1
                        self._keys[write] = key_of(f"{owner}#{count}" if count else owner)

    def materialize(
        self, which: str | Tensor, local: Tensor, coordinates: Sequence[Tensor] | None = None, *, seed: int
    ) -> Tensor:
        """Fill a block with the initial values of its global elements, in place.

        Shapes:
            local: n_0 n_1 ... (any strides, any device; on meta there is nothing to fill)
            coordinates: one int64 vector of n_d global coordinates a dim

        Args:
            which: a parameter or buffer of the model that was bound, or its name.
            local: the block to fill. Another floating dtype than the recorded one rounds, as ``model.to(dtype)`` would.
            coordinates: for each dim, the global coordinate of every local position; not below the global size means
                padding, filled with zero. None: the whole tensor.
            seed: the seed of the model.

        Raises:
            MeshfoldError: if the tensor was not made under this trace, stays uninitialised, or is initialised by an
                operation that cannot be replayed on a block. Names the parameter and the operation.
        """
        name, ref = self._find(which)
        log = self.recording.log_of(ref)
        if not log.defined(ref.writes):
            raise MeshfoldError(
                f"{name!r} is never initialised: nothing writes it while the model is built. (Under "
                "torch.device('meta') transformers skips its initialisation: leave that context out, recording makes "
                "meta tensors by itself; or use retrace_initialization(model).)"
            )
        if local.is_meta:
            return local
        if coordinates is None:
            coordinates = [torch.arange(size) for size in ref.geometry.size]
        # Values that are not random (rotary frequencies) are computed on the CPU, as in a plainly built model.
        small = ref.geometry.numel <= 1 << 20 and next(self._draws(ref, set()), None) is None
        device = torch.device("cpu") if small else local.device
        replay = Replay(self.recording, self._keys, seed, device, name, _ADVICE)
        with torch.no_grad():
            if local.dtype == ref.geometry.dtype and local.device == device:
                replay.block(ref, coordinates, out=local)
            else:
                local.copy_(replay.block(ref, coordinates))
        return local

    def shape_of(self, which: str | Tensor) -> tuple[int, ...]:
        """Return the global shape of a tensor of the model that was bound."""
        return self._find(which)[1].geometry.size

    def value(self, tensor: Tensor) -> Tensor:
        """Return the values of a recorded tensor that holds no random numbers: a new tensor on the CPU."""
        with _disable_current_modes(), torch.no_grad():
            ref = self.recording.ref(tensor)
            replay = Replay(self.recording, {}, 0, torch.device("cpu"), "a value that the builder reads", _ADVICE)
            return replay.block(ref, [torch.arange(size) for size in tensor.shape])

    def _find(self, which: str | Tensor) -> tuple[str, Ref]:
        if isinstance(which, str):
            if which not in self._names:
                raise MeshfoldError(
                    f"{which!r} was not made while this trace recorded (or trace.bind(model) was not called): build the "
                    f"model inside record_initialization() and without torch.device('meta'), or {_ADVICE}"
                )
            return which, self._names[which]
        if not self.recording.knows(which):
            raise MeshfoldError(
                f"a tensor of shape {tuple(which.shape)} on {which.device} was not made while this trace recorded: "
                f"make it inside record_initialization(), or {_ADVICE}"
            )
        ref = self.recording.ref(which)
        names = [name for name, bound in self._names.items() if bound.storage == ref.storage]
        return (names or ["a tensor without a name"])[0], ref

    def _draws(self, ref: Ref, seen: set[tuple[int, int]], deep: bool = True) -> Iterator[tuple[int, Write]]:
        """Yield the random writes that a tensor's values depend on, with their storages, in order."""
        if (ref.storage, ref.writes) in seen:
            return
        seen.add((ref.storage, ref.writes))
        for write in self.recording.log_of(ref).live(ref.writes):
            for source in write.refs if deep else ():
                yield from self._draws(source, seen)
            if write.random:
                yield ref.storage, write


@contextmanager
def record_initialization() -> Iterator[InitTrace]:
    """Record how tensors get their values: inside, every factory makes a tensor on the meta device.

    ``torch.device("meta")`` is not needed; code that reads a tensor's value (``.item()``, ``.tolist()``, a branch)
    gets it, unless it is random. Call ``trace.bind(model)`` once the model exists.
    """
    trace = InitTrace()
    with (
        noting_truncated_normal(trace.recording),
        Reader(trace.value),
        Recorder(trace.recording, trace.value),
    ):
        yield trace


def build_on_meta(builder: Callable[[], Module]) -> tuple[Module, InitTrace]:
    """Build a model without allocating it: its tensors are on the meta device, and the trace records how they get their values.

    Args:
        builder: makes the model in the plain way: ``lambda: AutoModelForCausalLM.from_config(config)``.

    Returns:
        The model and its trace, bound to each other.
    """
    with record_initialization() as trace:
        model = builder()
    trace.bind(model)
    return model, trace


def retrace_initialization(model: nn.Module) -> InitTrace:
    """Return a trace for a model that is already on the meta device, by having every module initialise itself again.

    Calls ``initialize_weights`` of Hugging Face models and ``reset_parameters`` of other modules. Other operations of a constructor
    are not seen; `materialize` raises for tensors that stay uninitialised.
    """
    done: set[nn.Module] = set()
    with record_initialization() as trace, _untied(model):
        for module in model.modules():
            if module in done:
                continue
            if callable(start := getattr(module, "initialize_weights", None)):
                done.update(module.modules())
                start()
            elif callable(start := getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))):
                start()
    trace.bind(model)
    return trace


@contextmanager
def _untied(model: nn.Module) -> Iterator[None]:
    """Keep a shared parameter only in its first module, because constructors tie after they initialise."""
    seen: set[Tensor] = set()
    tied: list[tuple[nn.Module, str, nn.Parameter]] = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter in seen:
                tied.append((module, name, parameter))
                module._parameters[name] = nn.Parameter(torch.empty_like(parameter), parameter.requires_grad)
            elif parameter is not None:
                seen.add(parameter)
    try:
        yield
    finally:
        for module, name, parameter in tied:
            module._parameters[name] = parameter


def materialize(
    model: Module,
    trace: InitTrace,
    *,
    seed: int,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    placement_of: PlacementOf | None = None,
    parameters: bool = True,
) -> Module:
    """Replace every meta parameter and buffer of a model, in place, by a real one that holds this rank's block.

    Tensors that are already real are moved and cut too. Tied parameters stay tied, and what was attached to a
    parameter stays attached.

    Args:
        model: the model.
        trace: the trace it was built under.
        seed: decides the random numbers.
        device: where the tensors go.
        dtype: of floating parameters and buffers, as ``model.to(dtype)``; None keeps each tensor's own.
        placement_of: from a tensor's name and the meta tensor to one vector of global coordinates a dim (as
            `Placement.coordinates` gives them), or None for a whole tensor. Left out: all whole.
        parameters: False leaves parameters unchanged, for a caller that asks the trace for them one by one.

    Returns:
        The model.

    Raises:
        MeshfoldError: if a parameter or buffer stays uninitialised or cannot be replayed. Names it.
    """
    trace.bind(model)
    device = torch.device(device)
    blocks: dict[object, Tensor] = {}
    made: dict[Tensor, nn.Parameter] = {}

    def block_of(name: str, tensor: Tensor) -> Tensor:
        identity = trace.recording.ref(tensor) if trace.recording.knows(tensor) else tensor
        if identity not in blocks:
            wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            coordinates = placement_of(name, tensor) if placement_of is not None else None
            if coordinates is None:
                coordinates = [torch.arange(size) for size in tensor.shape]
            local = torch.empty([len(points) for points in coordinates], dtype=wanted, device=device)
            if tensor.is_meta:
                trace.materialize(tensor if trace.recording.knows(tensor) else name, local, coordinates, seed=seed)
            else:
                local.copy_(take_block(tensor.detach(), coordinates))
            blocks[identity] = local
        return blocks[identity]

    for prefix, module in model.named_modules():
        path = f"{prefix}." if prefix else ""
        for name, parameter in module._parameters.items():
            if parameter is not None and parameters:
                if parameter not in made:
                    block = block_of(path + name, parameter)
                    made[parameter] = nn.Parameter(block, requires_grad=parameter.requires_grad)
                    made[parameter].__dict__.update(parameter.__dict__)
                    copy_parameter_hooks(parameter, made[parameter])
                module._parameters[name] = made[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = block_of(path + name, buffer)
        for name, tensor in _plain_tensors(module):
            if tensor.is_meta:
                setattr(module, name, block_of(path + name, tensor))
    return model


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    # All names of tied parameters, since a pipeline stage may keep a later one. The first name determines the key.
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers()
    for prefix, module in model.named_modules():
        for name, tensor in _plain_tensors(module):
            yield f"{prefix}.{name}" if prefix else name, tensor


def _plain_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the tensors that a module has as plain attributes."""
    return [(name, value) for name, value in vars(module).items() if isinstance(value, Tensor)]
