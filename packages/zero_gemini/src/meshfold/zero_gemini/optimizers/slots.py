"""State of one parameter, as in ``state[parameter]`` and as the kernels take it.

========= ====== =============================================================================== ==========
parameter regime kept beside it                                                                  bytes each
========= ====== =============================================================================== ==========
float32   A      ``exp_avg``, ``exp_avg_sq`` in float32                                          12
bfloat16  A      the same, and ``master_lo``, int16: what the parameter lacks of its float32     12
bfloat16  B      ``exp_avg``, ``exp_avg_sq`` in bfloat16, and ``master_lo``                      8
bfloat16  C      the same as 8-bit codes, their scales every 256 elements, and ``master_lo``     6.03
float16   A      ``exp_avg``, ``exp_avg_sq``, and ``master``, all in float32                     14
========= ====== =============================================================================== ==========

All but the scales have the parameter's shape, and are stored row by row whatever its strides are. Bytes count the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from meshfold.kernels import AdamState, QuantizedState, SplitState, WholeState, join_master, split_master

REGIMES = ("A", "B", "C")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOMENTS = ("exp_avg", "exp_avg_sq")
_SHARED = 256  # elements that share a scale in regime C


def fresh(parameter: Tensor, regime: str) -> dict[str, Tensor]:
    """Return the state of a parameter before its first step."""
    shape, device = parameter.shape, parameter.device
    step = {"step": torch.tensor(0.0, dtype=torch.float32)}  # on the CPU, as in torch

    def zeros(dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    if parameter.dtype != torch.bfloat16:
        master = {"master": row_major(parameter).float()} if parameter.dtype == torch.float16 else {}
        return {**step, **master, **{name: zeros(torch.float32) for name in MOMENTS}}
    lo = {"master_lo": zeros(torch.int16)}
    if regime != "C":
        kept = torch.float32 if regime == "A" else torch.bfloat16
        return {**step, **lo, **{name: zeros(kept) for name in MOMENTS}}
    blocks = -(-parameter.numel() // _SHARED)
    scales = {f"{name}_scale": torch.zeros(blocks, device=device, dtype=torch.float32) for name in MOMENTS}
    return {**step, **lo, **{name: zeros(torch.uint8) for name in MOMENTS}, **scales}


def adam_state(weights: Tensor, state: Mapping[str, Tensor]) -> AdamState:
    """Return the views of a parameter's state for the kernels.

    Args:
        weights: the parameter's elements row by row, flat and contiguous.
        state: as :func:`fresh` made it.
    """
    m, v = (state[name].view(-1) for name in MOMENTS)
    if weights.dtype == torch.float32:
        return WholeState(parameter=weights, exp_avg=m, exp_avg_sq=v)
    if weights.dtype == torch.float16:
        return WholeState(parameter=state["master"].view(-1), exp_avg=m, exp_avg_sq=v, copy=weights)
    lo = state["master_lo"].view(-1)
    if m.dtype != torch.uint8:
        return SplitState(hi=weights, lo=lo, exp_avg=m, exp_avg_sq=v)
    m_scale, v_scale = (state[f"{name}_scale"] for name in MOMENTS)
    return QuantizedState(hi=weights, lo=lo, exp_avg=m, exp_avg_scale=m_scale, exp_avg_sq=v, exp_avg_sq_scale=v_scale)


def row_major(x: Tensor) -> Tensor:
    """Return the elements row by row: the tensor itself if stored so, else a copy."""
    return x.detach().contiguous()


def master_of(parameter: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """Return the float32 value of a parameter, of its shape, in a new tensor."""
    if "master" in state:
        return state["master"].clone()
    if "master_lo" in state:
        flat = join_master(row_major(parameter).view(-1), state["master_lo"].view(-1))
        return flat.view(parameter.shape)
    return row_major(parameter).to(torch.float32, copy=True)


def set_master(parameter: Tensor, state: dict[str, Tensor], value: Tensor) -> None:
    """Set a parameter to a float32 value of its shape: the parameter takes the bits that it can hold, its state the rest."""
    value = row_major(value).to(parameter.device, torch.float32)
    if "master_lo" in state:
        hi, lo = split_master(value.view(-1))
        parameter.copy_(hi.view(parameter.shape))
        state["master_lo"].copy_(lo.view(parameter.shape))
    else:
        parameter.copy_(value)
        if "master" in state:
            state["master"].copy_(value)


def notice_change(parameter: Tensor, state: Mapping[str, Tensor]) -> None:
    """Copy elements that other code has written to a float16 parameter into its master weights.

    In bfloat16 there is nothing to do: the parameter is the master's upper half itself.
    """
    if "master" in state:
        master = state["master"]
        seen = row_major(parameter)
        torch.where(master.to(seen.dtype) == seen, master, seen.float(), out=master)


def taken(parameter: Tensor, saved: Mapping[str, Any], regime: str) -> dict[str, Tensor]:
    """Return saved state, copied into memory of this parameter's own.

    Args:
        saved: from a state_dict of ours in the same regime, or of torch's Adam or AdamW.

    Raises:
        ValueError: for the state of a parameter of another shape or dtype, or of another optimizer.
    """
    state = fresh(parameter, regime)
    missing = [name for name in ("step", *MOMENTS) if name not in saved]
    foreign = [name for name in saved if name not in state]
    if missing or foreign:
        wrong = f"lacks {missing[0]!r}" if missing else f"has {foreign[0]!r}"
        raise ValueError(
            f"the saved state of a parameter {wrong}; a {str(parameter.dtype).removeprefix('torch.')} parameter in regime "
            f"{regime!r} has {', '.join(state)}: load what the same optimizer saved of the same parameters"
        )
    for name, own in state.items():
        if name not in saved:  # a state of torch's Adam: its parameters are the master weights
            continue
        value = saved[name]
        if name == "step":
            own.fill_(float(value))
        elif value.shape != own.shape:
            raise ValueError(
                f"the saved {name!r} has shape {list(value.shape)} where {list(own.shape)} belongs to a parameter of shape "
                f"{list(parameter.shape)}: load what the same optimizer saved of the same parameters"
            )
        elif own.dtype == torch.uint8 and value.dtype != torch.uint8:
            _quantize(state, name, value.to(own.device))
        else:
            own.copy_(value)
    return state


def _quantize(state: Mapping[str, Tensor], name: str, value: Tensor) -> None:
    """Encode a floating-point moment."""
    lo = state["master_lo"].view(-1)
    kept = adam_state(torch.zeros_like(lo, dtype=torch.bfloat16), state)
    kept.load_moment(name, row_major(value).view(-1))
