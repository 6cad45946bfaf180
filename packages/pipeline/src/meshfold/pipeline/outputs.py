"""The model's output, made where its last stage is, on every rank of the axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from meshfold.mesh import Group, SpecError, broadcast
from meshfold.pipeline.ghosts import DTYPES

_LONGEST = 512  # bytes of the names of an output's fields


class Output(SimpleNamespace):
    """The tensors of an output by name."""

    def __getitem__(self, name: str) -> Tensor:
        found: Tensor = getattr(self, name)
        return found


def share(outputs: Sequence[Any] | None, group: Group, source: int, device: torch.device) -> Any:
    """Put the outputs of micro-batches together, and give them to all.

    Args:
        outputs: in order, where the last stage is; None elsewhere.
        group: of the pipeline axis.
        source: index of the rank that has them.
        device: of the tensors.

    Returns:
        A tensor, if outputs are tensors; else an :class:`Output` with those fields that are tensors with rows.

    Raises:
        SpecError: if there is no such tensor.
    """
    fields = None if outputs is None else _joined(outputs)
    count = torch.tensor([-1 if fields is None else len(fields)], device=device)
    count = broadcast(count, group, source)
    names, tensors = [], []
    for place in range(int(count)):
        name, tensor = ("", None) if fields is None else list(fields.items())[place]
        head = _head(name, tensor).to(device)
        name, shape, dtype = _read(broadcast(head, group, source).tolist())
        given = torch.empty(shape, dtype=dtype, device=device) if tensor is None else tensor
        names.append(name)
        tensors.append(broadcast(given, group, source))
    if not names:
        raise SpecError("the model's output has no tensor with rows to hand out")
    return tensors[0] if names == [""] else Output(**dict(zip(names, tensors, strict=True)))


def _joined(outputs: Sequence[Any]) -> dict[str, Tensor]:
    if isinstance(outputs[0], Tensor):
        return {"": torch.cat([_rows(output) for output in outputs])}
    found = [dict(one) if isinstance(one, Mapping) else vars(one) for one in outputs]
    return {
        name: torch.cat([fields[name] for fields in found])
        for name, value in found[0].items()
        if isinstance(value, Tensor) and value.dim()
    }


def _rows(output: Tensor) -> Tensor:
    return output if output.dim() else output.view(1)


def _head(name: str, tensor: Tensor | None) -> Tensor:
    """Name, dtype and shape as numbers."""
    head = torch.zeros(_LONGEST + 12, dtype=torch.int64)
    if tensor is not None:
        encoded = name.encode()[:_LONGEST]
        head[0], head[1], head[2] = len(encoded), tensor.dim(), DTYPES.index(tensor.dtype)
        head[3 : 3 + tensor.dim()] = torch.tensor(tensor.shape)
        head[12 : 12 + len(encoded)] = torch.tensor(list(encoded), dtype=torch.int64)
    return head


def _read(head: list[int]) -> tuple[str, tuple[int, ...], torch.dtype]:
    length, dims, dtype = head[:3]
    return bytes(head[12 : 12 + length]).decode(), tuple(head[3 : 3 + dims]), DTYPES[dtype]
