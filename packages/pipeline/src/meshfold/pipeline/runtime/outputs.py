"""The output of the last stage, made available on every rank of the axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from meshfold.mesh import Group, SpecError, broadcast
from meshfold.pipeline.runtime.placeholders import DTYPES

_LONGEST = 512  # bytes for the names of an output's fields
_NONE = -2  # sent instead of the number of fields if collecting them failed


class Output(SimpleNamespace):
    """The tensors of an output by name."""

    def __getitem__(self, name: str) -> Tensor:
        found: Tensor = getattr(self, name)
        return found


def share(outputs: Sequence[Any] | None, group: Group, source: int, device: torch.device) -> Any:
    """Concatenate the outputs of micro-batches, and broadcast them.

    Args:
        outputs: in order, on the rank of the last stage; None elsewhere.
        group: of the pipeline axis.
        source: index of the rank that has them.
        device: of the tensors.

    Returns:
        A tensor if outputs are tensors. For a tuple, a tuple of its tensors with rows. Otherwise an :class:`Output` with such
        fields.

    Raises:
        SpecError: on all ranks, if there is no such tensor, or the micro-batches' tensors cannot be concatenated.
    """
    fields: list[tuple[Tensor, Tensor]] = []  # header and tensor
    error: Exception | None = None
    if outputs is not None:
        try:
            fields = [(_head(name, tensor), tensor) for name, tensor in _joined(outputs).items()]
        except Exception as wrong:  # the other ranks wait for the number of fields
            error = wrong
    count = torch.tensor([_NONE if error is not None else len(fields)], device=device)
    count = broadcast(count, group, source)
    if int(count) == _NONE:
        why = "on the last stage's rank" if error is None else error
        raise SpecError(
            f"the outputs of several micro-batches cannot be joined: {why}. Return tensors whose first dim is the "
            "batch, alone, in a tuple or in an object with attributes"
        ) from error
    names, tensors = [], []
    for place in range(int(count)):
        head, tensor = (_no_head(), None) if outputs is None else fields[place]
        name, shape, dtype = _read(broadcast(head.to(device), group, source).tolist())
        given = torch.empty(shape, dtype=dtype, device=device) if tensor is None else tensor
        names.append(name)
        tensors.append(broadcast(given, group, source))
    if not names:
        raise SpecError("the model's output has no tensor whose first dim is the batch: return one")
    if names == [""]:
        return tensors[0]
    if all(name.isdigit() for name in names):
        return tuple(tensors)
    return Output(**dict(zip(names, tensors, strict=True)))


def _joined(outputs: Sequence[Any]) -> dict[str, Tensor]:
    if isinstance(outputs[0], Tensor):
        return {"": torch.cat([_rows(output) for output in outputs])}
    found = [_fields(one) for one in outputs]
    return {
        name: torch.cat([fields[name] for fields in found])
        for name, value in found[0].items()
        if isinstance(value, Tensor) and value.dim()
    }


def _fields(output: Any) -> dict[str, Any]:
    """Return an output's parts by name, a tuple's by index."""
    if isinstance(output, Mapping):
        return dict(output)
    if isinstance(output, tuple) and hasattr(output, "_asdict"):
        named: dict[str, Any] = output._asdict()
        return named
    if isinstance(output, tuple | list):
        return {str(place): part for place, part in enumerate(output)}
    found: dict[str, Any] = vars(output)
    return found


def _rows(output: Tensor) -> Tensor:
    return output if output.dim() else output.view(1)


def _head(name: str, tensor: Tensor) -> Tensor:
    """Encode name, dtype and shape as numbers."""
    head, encoded = _no_head(), name.encode()[:_LONGEST]
    head[0], head[1], head[2] = len(encoded), tensor.dim(), DTYPES.index(tensor.dtype)
    head[3 : 3 + tensor.dim()] = torch.tensor(tensor.shape)
    head[12 : 12 + len(encoded)] = torch.tensor(list(encoded), dtype=torch.int64)
    return head


def _no_head() -> Tensor:
    return torch.zeros(_LONGEST + 12, dtype=torch.int64)


def _read(head: list[int]) -> tuple[str, tuple[int, ...], torch.dtype]:
    length, dims, dtype = head[:3]
    return bytes(head[12 : 12 + length]).decode(), tuple(head[3 : 3 + dims]), DTYPES[dtype]
