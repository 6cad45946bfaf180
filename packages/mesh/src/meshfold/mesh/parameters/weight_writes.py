"""Parameters that notice what a user's own code writes to them between steps, where their weights are stored elsewhere too.

The optimizer may update other memory than the parameters: shards of chunks, master weights in float32, state on the host. A
parameter then has one of these classes, which torch and a model see as ``nn.Parameter``:

- :class:`WatchedParameter` has its values. Whoever stores its weights asks :func:`was_written`, and takes over what it was given.
- :class:`RefusingParameter` has no values now, or old ones. torch would do nothing, or change what is replaced, both silently.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any, Never

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshfold.mesh.errors import MeshfoldError
from meshfold.mesh.parameters.gradient_proxy import GradientProxy

_DATA: Any = torch._C.TensorBase.data
_NOTED = "_meshfold_version"
_FUNCTION = "__torch_function__"
_PLAIN = torch._C._disabled_torch_function_impl
"""What ``nn.Parameter`` has as ``__torch_function__``. torch reads a watched parameter's from the parameter, and then makes no call
of Python for it. torch.compile reads it from the class, and where a function mode is active, as for dropout or a split sequence, it
cannot trace this one: each look at a parameter would cut the graph of a block."""
_SKIPS = hasattr(torch._C, "_skip_one_hop_torch_function")  # not in torch 2.11
_WHY = "_meshfold_why"


class WeightWriteError(MeshfoldError, RuntimeError):
    """Weights that were read or changed by a user's own code where they are not, or in a way that would be lost."""


class WatchedParameter(nn.Parameter):
    """A parameter whose weights are stored elsewhere too; ``.data`` is noted, since torch does not count changes made by it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function as for ``nn.Parameter``. Compiled code traces this; elsewhere :data:`_PLAIN` is found in its stead."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            if _SKIPS:
                return torch._C._skip_one_hop_torch_function(func, types, args, kwargs)
            if isinstance(
                func, FunctionType
            ):  # would ask a parameter again, but no view of it, which is a plain tensor
                args = tuple(_plain(value) for value in args)
                kwargs = {name: _plain(value) for name, value in kwargs.items()}
            return func(*args, **kwargs)

    @property
    def data(self) -> Tensor:
        """The values. A new tensor is copied into them, since other memory refers to theirs.

        Raises:
            WeightWriteError: for a tensor of another shape, dtype or device.
        """
        self.__dict__[_NOTED] = None
        found: Tensor = _DATA.__get__(self)
        return found

    @data.setter
    def data(self, values: Tensor) -> None:
        mine = self.data
        if (values.shape, values.dtype, values.device) != (mine.shape, mine.dtype, mine.device):
            raise WeightWriteError(
                f"parameter.data = a tensor of shape {tuple(values.shape)} in {values.dtype} on {values.device}, for one of "
                f"{tuple(mine.shape)} in {mine.dtype} on {mine.device}, whose weights the engine stores: give the same shape, "
                "dtype and device, or make the engine of a model that has the others"
            )
        if values.data_ptr() != mine.data_ptr():
            with torch.no_grad():
                mine.copy_(values)


def _plain(value: Any) -> Any:
    return value.view(value.shape) if isinstance(value, WatchedParameter) else value


class RefusingParameter(nn.Parameter):
    """A parameter whose values are not there now; methods and functions that would read or change them raise."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run what asks for a shape, a dtype, a gradient or a hook, and what Meshfold calls itself.

        Raises:
            WeightWriteError: for any other function of torch, as ``torch.exp`` or ``F.linear``.
        """
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if name not in _LOOKS or attribute in _VIEWS:
            given = tree_leaves((args, kwargs))
            mine = [one for one in given if isinstance(one, RefusingParameter)]
            if mine and not any(isinstance(one, GradientProxy) for one in given) and not _is_ours():
                _refuse(mine[0], f".{attribute}" if attribute in _VIEWS else f"{name}()")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @property
    def data(self) -> Tensor:
        """Raise a :class:`WeightWriteError`."""
        _refuse(self, ".data")

    @data.setter
    def data(self, values: Tensor) -> None:
        _refuse(self, ".data = ...")

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a copy that refuses too."""
        made = nn.Parameter(_DATA.__get__(self).clone(), self.requires_grad)
        made.__dict__.update(self.__dict__)
        settle(made)
        made.__class__ = RefusingParameter
        memo[id(self)] = made
        return made


_LOOKS = frozenset(
    """
    __get__ __set__ __delete__ __hash__ __repr__ __len__ __format__ __dir__ __reduce_ex__ __eq__ size dim ndimension numel nelement
    element_size stride is_contiguous is_floating_point is_complex is_signed is_pinned is_shared get_device data_ptr untyped_storage
    storage_offset storage type requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad backward has_names
    is_same_size result_type can_cast is_tensor is_storage is_inference is_conj is_neg _is_view new_empty new_zeros new_ones
    new_full new_tensor
    """.split()  # noqa: SIM905
)
"""Names of what does not need values."""
_VIEWS = frozenset(("T", "mT", "H", "mH", "real", "imag"))
"""Attributes that are other views of the values."""


def _is_ours() -> bool:
    """Return True if Meshfold's own code called torch's function; it does not if it only passes a user's call on."""
    frame: FrameType | None = sys._getframe(2)
    ours: bool | None = None
    while frame is not None and (package := str(frame.f_globals.get("__name__")).partition(".")[0]) in (
        "torch",
        "meshfold",
    ):
        if frame.f_code.co_name in ("__torch_function__", "__torch_dispatch__"):
            ours = None
        elif package == "meshfold":
            ours = True
        frame = frame.f_back
    return ours is True


def _refuse(parameter: nn.Parameter, what: str) -> Never:
    name, why = parameter.__dict__.get(_WHY, ("parameter", "whose values are not there"))
    raise WeightWriteError(f"{what} of {name!r}, {why}. {remedy(name)}")


def remedy(name: str) -> str:
    """Return how to read and change weights between steps, for messages about a parameter."""
    return (
        "To read or change weights between steps, on all ranks: state = engine.full_state_dict(), change "
        f"state[{name!r}], engine.load_state_dict(state)"
    )


def _refusing(name: str) -> Callable[..., Any]:
    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        others = [self, *args, *kwargs.values()]
        if any(
            isinstance(one, GradientProxy) for one in others
        ):  # an optimizer of a user's own: gradients say what to call
            return getattr(Tensor, name)(self, *args, **kwargs)
        _refuse(next(one for one in others if isinstance(one, RefusingParameter)), f"{name}()")

    method.__name__ = name
    return method


_READS = """
abs add all amax amin any bfloat16 clamp clone contiguous cos cpu cuda detach div double exp expm1 flatten float gather half
index_select item lerp log log1p log_softmax masked_fill matmul max mean min mm mul mv narrow norm numpy pow ravel relu
reshape round select sigmoid sign sin softmax sort sqrt square std sub sum tanh to tolist topk unsqueeze var view
""".split()  # noqa: SIM905
_OPERATORS = ["add", "sub", "mul", "truediv", "matmul", "pow"]
for _method in (
    *(name for name in dir(Tensor) if name.endswith("_") and not name.startswith("_") and name != "requires_grad_"),
    *_READS,
    *(f"__{kind}{name}__" for kind in ("", "r", "i") for name in _OPERATORS),
    "__getitem__",
    "__setitem__",
    "__neg__",
):
    setattr(RefusingParameter, _method, _refusing(_method))

OWN_KINDS = (nn.Parameter, WatchedParameter, RefusingParameter)
"""Classes of parameters that are not a user's own, nor stand-ins."""


def watch(parameter: Tensor) -> None:
    """Note from now on what is written to a parameter; one of a user's own class only by torch's own count."""
    _become(parameter, WatchedParameter)
    settle(parameter)


def unwatch(parameter: Tensor) -> None:
    """Make a parameter torch's own again, with or without elements."""
    _become(parameter, nn.Parameter)
    parameter.__dict__.pop(_NOTED, None)


def refuse(parameter: nn.Parameter, name: str, why: str, *, nothing: Tensor | None = None) -> None:
    """Refuse uses of a parameter from now on.

    Args:
        parameter: of a model.
        name: its name, for messages.
        why: its values are not there, as a clause that begins with which or whose.
        nothing: an empty tensor that replaces its values; None leaves them to torch's functions.
    """
    if nothing is not None:
        _DATA.__set__(parameter, nothing)
    settle(parameter)
    parameter.__dict__[_WHY] = name, why
    _become(parameter, RefusingParameter)


def give(parameter: Tensor, values: Tensor) -> None:
    """Give a parameter its values, as its owner: nothing was written by a user. It is not watched."""
    _become(parameter, nn.Parameter)
    _DATA.__set__(parameter, values)


def values_of(parameter: Tensor) -> Tensor:
    """Return a parameter's ``.data``, as its owner: nobody notes or refuses it."""
    found: Tensor = _DATA.__get__(parameter)
    return found


def set_values(parameter: Tensor, values: Tensor) -> None:
    """Set a parameter's ``.data``, as its owner."""
    _DATA.__set__(parameter, values)


def settle(parameter: Tensor) -> None:
    """Forget what was written to a parameter."""
    parameter.__dict__[_NOTED] = _version_of(parameter)


def was_written(parameter: Tensor) -> bool:
    """Return True if a parameter may have been written to since :func:`watch`, :func:`refuse` or :func:`settle`."""
    own = parameter.__dict__
    return _NOTED in own and own[_NOTED] != _version_of(parameter)


def _version_of(parameter: Tensor) -> int:
    """Return torch's count of writes, without a call of Python for each of hundreds of parameters in every step."""
    with torch._C.DisableTorchFunction():
        return parameter._version


def _become(parameter: Tensor, kind: type[nn.Parameter]) -> None:
    if type(parameter) in OWN_KINDS:
        parameter.__class__ = kind
        if kind is WatchedParameter:
            parameter.__dict__[_FUNCTION] = _PLAIN
        else:
            parameter.__dict__.pop(_FUNCTION, None)


@torch.no_grad()
def with_written(master: Tensor, parameter: Tensor) -> Tensor | None:
    """Return master weights with what was written to the parameter, or None if nothing was.

    Where the parameter still is the rounded master weight, the master keeps its precision.

    Args:
        master: the weights, of any shape and device.
        parameter: the values that a model computes with, of the same shape.
    """
    now = parameter.detach().to(master.device)
    changed = master.to(now.dtype) != now
    return torch.where(changed, now.to(master.dtype), master) if bool(changed.any()) else None
