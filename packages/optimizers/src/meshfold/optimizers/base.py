"""Base of the optimizers: the view of a tensor that they need, its gradient, its step count."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeAlias, overload

import torch
from torch import Tensor

from meshfold.optimizers.blocks import Blocks, WholeTensors
from meshfold.optimizers.roles import MATRICES, ROLES
from meshfold.optimizers.settings import OptimizerSettingError

Sight = Literal["elements", "norms", "matrices"]
"""An optimizer needs single elements, single elements and two norms of each tensor, or whole tensors."""

SquareSums: TypeAlias = Callable[[Sequence[Tensor], Sequence[Sequence[Tensor]]], Tensor]
"""Function of ``(parameters, rows)`` that returns the sums of squares, float64 of shape ``(len(rows), len(parameters))``.

Each row has one tensor for each parameter, of its shape. The sums are over whole tensors. Code that has shards sets a function that
sums over ranks, all tensors in one all-reduce. All ranks call it in every step, also those without parameters.
"""


def square_sums(parameters: Sequence[Tensor], rows: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the sums of squares of whole tensors; see :data:`SquareSums`."""
    if not parameters:
        return torch.zeros(len(rows), 0, dtype=torch.float64)
    device = parameters[0].device
    sums = []
    for row in rows:
        wide = torch.float64 if row[0].dtype == torch.float64 else torch.float32
        norms = torch._foreach_norm(list(row), 2.0, dtype=wide)
        sums.append(torch.stack([one.to(device, torch.float64) for one in norms]).square())
    return torch.stack(sums)


def gradient_of(parameter: Tensor) -> Tensor:
    """Return the gradient of a parameter that has one."""
    assert parameter.grad is not None  # only parameters with a gradient are stepped
    return parameter.grad


class ListSteps:
    """Common part of optimizers that step over lists of tensors by kernels.

    Attributes:
        kernels: functions that step, ``meshfold.kernels.STEP_KERNELS``; empty: torch's operations.
        copies: of parameters in lower precision, by parameter. A step may also write them, and adds these parameters to ``copied``.
            The others must be copied after it.
        copied: parameters whose copies are written; the reader empties it.
    """

    kernels: Mapping[str, Callable[..., Any]] = MappingProxyType({})
    copies: Mapping[Tensor, Tensor] = MappingProxyType({})

    @property
    def copied(self) -> set[Tensor]:
        """Parameters whose copies are written."""
        found: set[Tensor] = self.__dict__.setdefault("_copied", set())
        return found

    def _list_kernel(self, name: str, *lists: Sequence[Tensor]) -> Callable[..., Any] | None:
        """Return a kernel over lists of tensors if it can take these: on one device, of one dtype, contiguous."""
        kernel, first = self.kernels.get(name), lists[0][0]
        if kernel is None or first.dtype not in (torch.float32, torch.float64):
            return None
        fits = all(
            one.dtype == first.dtype and one.device == first.device and one.is_contiguous()
            for tensors in lists
            for one in tensors
        )
        return kernel if fits else None

    def _copies_of(self, chosen: Sequence[Tensor]) -> list[Tensor] | None:
        """Return the copies that a kernel is to write, and count them as written; None if it cannot write any."""
        found = [self.copies[p] for p in chosen if p in self.copies]
        if len(found) != len(chosen):
            return None
        if any(
            one.dtype != found[0].dtype or not one.is_contiguous() or one.shape != p.shape
            for one, p in zip(found, chosen, strict=True)
        ):
            return None
        self.copied.update(chosen)
        return found


class TensorOptimizer(ListSteps, torch.optim.Optimizer):
    """A torch optimizer that declares what it needs of a tensor.

    Attributes:
        sight: what it needs.
        elementwise: whether that is each element alone.
    """

    sight: ClassVar[Sight] = "matrices"
    elementwise: ClassVar[bool] = False

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step once on all parameters that have a gradient.

        Args:
            closure: recomputes the loss, with gradients; None: gradients are already computed.

        Returns:
            What the closure returned.

        Raises:
            OptimizerSettingError: for a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    def _step(self) -> None:
        """Step once, under no_grad."""
        raise NotImplementedError

    def _trained(self, group: dict[str, Any]) -> list[Tensor]:
        """Return a group's parameters that have a gradient."""
        found = [p for p in group["params"] if p.grad is not None]
        for parameter in found:
            if gradient_of(parameter).is_sparse:
                name = type(self).__name__
                raise OptimizerSettingError(
                    f"{name}: the gradient of shape {tuple(parameter.shape)} is sparse; use sparse=False for the embedding"
                )
        return found

    def _count(self, parameter: Tensor) -> float:
        """Count a step of a parameter and return the count. It is kept on the CPU, so reading it waits for no device."""
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
        state["step"] += 1
        return float(state["step"])

    def _moments(self, parameters: Iterable[Tensor], key: str) -> list[Tensor]:
        """Return each parameter's state tensor of this name, created as zeros in the parameter's shape."""
        found = []
        for parameter in parameters:
            state = self.state[parameter]
            if key not in state:
                state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            found.append(state[key])
        return found

    def _alike(self, chosen: Sequence[Tensor]) -> list[tuple[float, list[Tensor]]]:
        """Count a step of each parameter, and return those of one count, device and dtype together, with the count."""
        found: dict[tuple[float, torch.device, torch.dtype], list[Tensor]] = {}
        for parameter in chosen:
            found.setdefault((self._count(parameter), parameter.device, parameter.dtype), []).append(parameter)
        return [(count, alike) for (count, _, _), alike in found.items()]


def rate_of(group: Mapping[str, Any]) -> float | None:
    """Return a group's learning rate as a number; None if reading it would wait for a device."""
    rate = group["lr"]
    return None if isinstance(rate, Tensor) and rate.device.type != "cpu" else float(rate)


class NormOptimizer(TensorOptimizer):
    """An optimizer that needs the norms of whole tensors, and otherwise only single elements.

    Attributes:
        square_sums: sums the squares of whole tensors; code that gives the optimizer shards replaces it on the instance.
    """

    sight: ClassVar[Sight] = "norms"
    square_sums: SquareSums = staticmethod(square_sums)

    def _kernel(self, name: str, *tensors: Tensor) -> Callable[..., Any] | None:
        """Return a kernel if it can take these tensors, flattened."""
        kernel, first = self.kernels.get(name), tensors[0]
        fits = first.device.type == "cpu" and first.dtype in (torch.float32, torch.float64)
        alike = all(one.is_contiguous() and one.dtype == first.dtype and one.device == first.device for one in tensors)
        return kernel if fits and alike else None

    def _takes_sums(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether sums over this rank's shards are enough for ``square_sums``: no part of a shard counts otherwise."""
        takes = getattr(self.square_sums, "takes_sums", None)
        return self.square_sums is square_sums if takes is None else takes(parameters)

    def _whole_sums(self, parameters: Sequence[Tensor], sums: Tensor) -> Tensor:
        """Return sums over whole tensors, ``(rows, tensors)``, of those over shards; see :meth:`_takes_sums`."""
        add: Callable[[Sequence[Tensor], Tensor], Tensor] | None = getattr(self.square_sums, "of_sums", None)
        return sums if add is None else add(parameters, sums)

    def _norms(self, parameters: Sequence[Tensor], *rows: Sequence[Tensor]) -> list[dict[torch.device, Tensor]]:
        """Return the norms of each row's tensors, copied to every device that has parameters."""
        norms = self.square_sums(parameters, rows).sqrt()
        devices = {parameter.device for parameter in parameters}
        return [{device: row.to(device) for device in devices} for row in norms]


class MatrixOptimizer(TensorOptimizer):
    """An optimizer that must see sums over whole tensors, or whole matrices, and asks for them.

    Attributes:
        blocks: answers; code that gives the optimizer blocks of tensors replaces it on the instance.
    """

    blocks: Blocks = WholeTensors()


class RoleOptimizer(MatrixOptimizer):
    """An optimizer whose groups may have a ``role``, see :func:`meshfold.optimizers.role_groups`."""

    needs_roles: ClassVar[bool] = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see torch.

        Raises:
            OptimizerSettingError: for an unknown role, or a group of matrices that has a parameter of other than two or three dims.
        """
        role, name = param_group.get("role"), type(self).__name__
        if role is not None and role not in ROLES:
            raise OptimizerSettingError(f"{name}: role={role!r}; give one of {', '.join(map(repr, ROLES))}")
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if role == MATRICES and parameter.dim() not in (2, 3):
                raise OptimizerSettingError(
                    f"{name}: a parameter of shape {tuple(parameter.shape)} in a group of matrices; give it the role "
                    "norms_and_biases"
                )
