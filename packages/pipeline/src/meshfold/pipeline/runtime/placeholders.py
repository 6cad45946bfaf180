"""Placeholders in a rank's model for what other ranks hold: blocks, tensors of the right shape, and parameters of one element."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from meshfold.mesh import Group, LayoutError, all_reduce, annotate, metadata
from meshfold.mesh.tracking import set_tracked_layout, tracked_layout
from meshfold.pipeline.errors import ChainError


class AbsentBlock(nn.Module):
    """Placeholder for another rank's block, with the plain attributes that it and the modules in it had.

    A model may read them (``self.layers[0].self_attn.batch_first``). Stand-ins for the modules inside are not part of the model.
    """

    def __init__(self, block: nn.Module, kept: Sequence[nn.Module] = ()) -> None:
        """Args:
        block: of another rank.
        kept: modules in it that stay under their names, since this rank's stages call them outside of the block.
        """
        super().__init__()
        own = set(self.__dict__)
        plain = {name: value for name, value in block.__dict__.items() if name not in own}
        self.__dict__.update(plain)
        for name, child in block._modules.items():
            if child is not None and any(module in kept for module in child.modules()):
                self._modules[name] = child if child in kept else AbsentBlock(child, kept)
            else:
                self.__dict__[name] = None if child is None else AbsentBlock(child)
        self.kind = type(block).__name__
        self.__dict__["elsewhere"] = frozenset((*block._parameters, *block._buffers))

    def __getattr__(self, name: str) -> Any:
        """Raise: parameters and buffers of an absent block cannot be read."""
        if name in self.__dict__.get("elsewhere", ()):
            raise AttributeError(
                f"{name!r} of a {self.kind} is on another rank, whose stage has it: let the {self.kind} compute with it itself and "
                "return the result, or use a spec without pipeline"
            )
        return super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: an absent block is called only through a gate that does not run it."""
        raise LayoutError(f"this {self.kind} belongs to a stage on another rank: run the model through its Pipeline")

    def extra_repr(self) -> str:
        return f"{self.kind} of another rank"


def check_own_parameters(block: nn.Module, index: int) -> None:
    """Check that a block is called with its own parameters, which its stage has.

    Args:
        block: as it is called now.
        index: its number; the first stage runs what is before block 0 with gradients.

    Raises:
        ChainError: for a tensor in a parameter's place. A stage runs the code before its first block without gradients.
    """
    if index == 0:
        return
    for path, module in block.named_modules():
        for name, parameter in module._parameters.items():
            if type(parameter) is Tensor and _ZEROS not in parameter.__dict__:
                raise ChainError(
                    f"block {index} is called with a computed tensor as its {path + '.' if path else ''}{name}, as "
                    "torch.func.functional_call does. A stage that begins with this block would compute it without a graph, and "
                    f"the parameters behind it would get no gradient: let the {type(block).__name__} compute it in its own "
                    "forward, as torch.nn.utils.parametrize does, or use a spec without pipeline"
                )


class TensorPlaceholder:
    """Shape of an absent tensor, and its layout if known."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.tracked_layout = tracked_layout(tensor)

    def make(self, tracked: bool) -> Tensor:
        """Return NaN, so that mistakes show; if it is only inspected, zeros that require a gradient."""
        if tracked and self.dtype.is_floating_point:
            made = torch.zeros(self.shape, dtype=self.dtype, device=self.device, requires_grad=True).clone()
        else:
            value = float("nan") if self.dtype.is_floating_point else 0
            made = torch.full(self.shape, value, dtype=self.dtype, device=self.device)
        set_tracked_layout(made, self.tracked_layout)
        return made


def sign(leaf: Any) -> object:
    """Return the part of an argument that decides the shape of results."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device
    return leaf if isinstance(leaf, int | float | str | bool | type(None)) else type(leaf)


def signature(args: Any, kwargs: Any) -> object:
    """Return a key that decides the shapes of a forward: the shapes of its inputs, and its other arguments."""
    leaves, spec = tree_flatten((args, kwargs))
    return (*map(sign, leaves), str(spec), torch.is_grad_enabled())


DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
"""Dtypes by the number under which ranks exchange them"""
LARGE = 2**20
"""Parameters with more elements than this are represented by one element"""
_ZEROS = "_meshfold_zeros"
"""attribute of the zeros that stand for a tensor which is not on the device"""
_LOOKS = {"__get__", "size", "dim", "numel", "element_size", "is_floating_point", "__repr__", "stride"}


class AbsentParameter(Tensor):
    """A tensor of NaN. Code may inspect it, and use it before the blocks, where only shapes count.

    Attributes:
        label: the parameter's full name.
        used: whether a stage computes now, which must not use it.
    """

    label: str
    used: Callable[[], bool]

    @classmethod
    def of(cls, parameter: Tensor, label: str, device: torch.device, used: Callable[[], bool]) -> AbsentParameter:
        """Return the stand-in for a parameter, real or meta."""
        one = torch.full((), float("nan"), dtype=torch.float32).to(device, parameter.dtype)
        made = torch.Tensor._make_subclass(cls, one.expand(parameter.shape))
        made.label, made.used = label, used
        meta = metadata(parameter)
        if meta is not None:
            annotate(made, meta)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if getattr(func, "__name__", "") in _LOOKS:
                return func(*args, **(kwargs or {}))
            plain = tree_map_only(AbsentParameter, _plain, (args, kwargs or {}))
            try:
                return func(*plain[0], **plain[1])
            except RuntimeError:  # may need an element of its own in each place, as torch.view_as_complex does
                plain = tree_map_only(AbsentParameter, lambda absent: _plain(absent).contiguous(), (args, kwargs or {}))
                return func(*plain[0], **plain[1])


def _plain(absent: AbsentParameter) -> Tensor:
    if absent.used():
        raise LayoutError(
            f"{absent.label!r} belongs to a stage on another rank, but is used by function after the blocks: give it a "
            f"module of its own there (an nn.Linear whose weight is the same parameter), so that both stages keep it"
        )
    return absent.as_subclass(Tensor)


def agree_on_dtypes(parameters: Sequence[tuple[nn.Module, str]], group: Group, device: torch.device) -> None:
    """Give every stand-in the current dtype of its parameter; all ranks of the group must call.

    Args:
        parameters: (module, name in it) of all parameters of the model, in the same order on all ranks.
        group: whose ranks together keep all of them.
        device: of exchanged tensors.
    """
    if device.type == "meta":  # the other ranks are simulated
        return
    values = [getattr(module, name) for module, name in parameters]
    codes = [
        -1 if value is None or isinstance(value, AbsentParameter) else DTYPES.index(value.dtype) for value in values
    ]
    found = all_reduce(torch.tensor(codes, device=device), group, "max").tolist()
    for (module, name), value, code in zip(parameters, values, found, strict=True):
        if isinstance(value, AbsentParameter) and code >= 0:
            _recast(module, name, value, DTYPES[code])


def set_absent_dtype(parameters: Sequence[tuple[nn.Module, str]], dtype: torch.dtype) -> None:
    """Set the dtype of all stand-ins for floating-point parameters; :func:`agree_on_dtypes` for simulated ranks.

    Args:
        parameters: (module, name in it).
        dtype: of the tensors they represent.
    """
    for module, name in parameters:
        value = getattr(module, name)
        if name not in module._parameters and isinstance(value, Tensor) and value.is_floating_point():
            _recast(module, name, value, dtype)


def _recast(module: nn.Module, name: str, value: Tensor, dtype: torch.dtype) -> None:
    if value.dtype == dtype:
        return
    like = torch.empty(value.shape, dtype=dtype, device="meta")
    meta = metadata(value)
    if meta is not None:
        annotate(like, meta)
    if isinstance(value, AbsentParameter):
        like = AbsentParameter.of(like, value.label, value.device, value.used)
    module.__dict__[name] = like


@contextmanager
def zeros_in_place(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Replace all tensors of these modules that are not on the device by zeros; a large one by one expanded zero.

    Kernels that compute addresses get vectors and packed bytes in full.
    """
    swapped: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in modules:
        registries: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, module.__dict__)
        for registry in registries:
            for name, value in registry.items():
                if isinstance(value, Tensor) and value.device != device:
                    swapped.append((registry, name, value))
    for registry, name, value in swapped:
        large = value.is_floating_point() and value.numel() > LARGE
        zeros = torch.zeros(() if large else value.shape, dtype=value.dtype, device=device)
        registry[name] = zeros.expand(value.shape)
        registry[name].__dict__[_ZEROS] = True
        meta = metadata(value)
        if meta is not None:
            annotate(registry[name], meta)
    try:
        yield
    finally:
        for registry, name, value in swapped:
            registry[name] = value
