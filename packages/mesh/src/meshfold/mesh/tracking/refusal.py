"""The error of an operation that mixes a split dim: it quotes the line of the user's code."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from meshfold.mesh.errors import LayoutError

_TORCH = str(Path(torch.__file__).parent)
_MESHFOLD, _MODELS = "meshfold.", "meshfold.models"


def refusal(name: str, why: str, tensors: Sequence[Tensor], module: str, remedy: str) -> LayoutError:
    """Return the error that the user gets.

    Args:
        name: of the operation.
        why: it cannot be carried out on a rank's piece.
        tensors: its operands.
        module: full name of the module whose forward runs, and its class.
        remedy: what to write instead.
    """
    shapes = " and ".join(str(list(x.shape)) for x in tensors[:3] if x.dim())
    of = f" of {shapes} on each rank" if shapes else ""
    where = f"{module}: " if module else ""
    return LayoutError(
        f"{where}{_line()}: {name.strip('_')}{of} {why}. Each rank would compute it on its own piece alone, "
        f"which is something else than the model says. {remedy}"
    )


def _line() -> str:
    """The innermost line outside of torch and of this project, as it is written."""
    file, number = user_line()
    if not file:
        return "an operation"
    source = linecache.getline(file, number).strip()
    return f"{file}, line {number}: `{source}`" if source else f"{file}, line {number}"


def user_line() -> tuple[str, int]:
    """Its file and number; an empty name if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))
        ours = module.startswith(_MESHFOLD) and not module.startswith(_MODELS)
        if not ours and not file.startswith((_TORCH, "<")):
            return file, frame.f_lineno
        frame = frame.f_back
    return "", 0
