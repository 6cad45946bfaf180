"""Functional code that users write on the residual stream ``b t h``, each a function of it that keeps its shape."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Step = Callable[[Tensor], Tensor]


def _later(x: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)


def _gate(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * torch.sigmoid(second), second], -1)


def _in_place_add(x: Tensor) -> Tensor:
    y = x * 0.5
    y += torch.tanh(x)
    return y


def _in_place_mul(x: Tensor) -> Tensor:
    y = x - 0.1
    y.mul_(0.5)
    return y


def _there_and_back(x: Tensor) -> Tensor:
    return torch.tanh(x.reshape(-1, x.shape[-1])).view(x.shape)


#: Each element from itself alone: every spec can do it as it is written.
ELEMENTS: dict[str, Step] = {
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "mul": lambda x: x * 0.5 + 0.1,
    "square": lambda x: x.square() * 0.3,
    "in-place add": _in_place_add,
    "in-place mul": _in_place_mul,
    "flat": _there_and_back,
    "transposed": lambda x: torch.sin(x.transpose(0, 1)).transpose(0, 1),
    "clone": lambda x: x.clone() * 1.5,
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "clamp": lambda x: x.clamp(-1.0, 1.0),
    "keyword": lambda x: F.leaky_relu(input=x, negative_slope=0.2),
    "dropout of 0": lambda x: F.dropout(x, 0.0, training=True) * 0.9,
}

#: Each element from others of its token.
HIDDEN: dict[str, Step] = {
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, dim=-1) * 0.1,
    "centre": lambda x: x - x.mean(-1, keepdim=True),
    "F.layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "F.rms_norm": lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-6),
    "F.normalize": lambda x: F.normalize(x, dim=-1),
    "rms": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),
    "std": lambda x: x / (x.std(-1, keepdim=True) + 1.0),
    "gate": _gate,
    "halves": lambda x: torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1),
    "F.glu": lambda x: torch.cat([F.glu(x, -1), F.glu(x.flip(-1), -1)], -1),
    "flip h": lambda x: x.flip(-1),
    "roll h": lambda x: x.roll(1, -1),
    "cumsum h": lambda x: x.cumsum(-1) * 0.1,
    "first feature": lambda x: x * x[..., :1],
    "groups": lambda x: F.group_norm(x.flatten(0, -2), 2).view_as(x),
    "max h": lambda x: x - x.amax(-1, keepdim=True),
    "sort h": lambda x: x.sort(-1).values,
    "view heads": lambda x: (x.unflatten(-1, (2, -1)).softmax(-2)).flatten(-2),
    "dot": lambda x: x * (x * x).sum(-1, keepdim=True) * 0.1,
}

#: Each element from other tokens of its row.
TOKENS: dict[str, Step] = {
    "shift": lambda x: x + _later(x),
    "mixed shift": lambda x: 0.5 * x + 0.5 * _later(x),
    "first token": lambda x: x + x[:, :1],
    "last token": lambda x: x * x[:, -1:],
    "mean t": lambda x: x - x.mean(1, keepdim=True),
    "cumsum": lambda x: x.cumsum(1) * 0.2,
    "roll": lambda x: x + x.roll(1, 1),
    "flip": lambda x: x + x.flip(1),
    "softmax t": lambda x: x.softmax(1),
    "own scores": lambda x: torch.softmax(x @ x.transpose(1, 2), -1) @ x,
    "pool": lambda x: F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2),
    "pad": lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1] + x,
    "index": lambda x: x + x[:, torch.arange(x.shape[1], device=x.device).flip(0)],
    "positions": lambda x: x * (1 + 0.1 * torch.arange(x.shape[1], device=x.device, dtype=x.dtype))[:, None],
    "amax t": lambda x: x - x.amax(1, keepdim=True),
    "interpolate": lambda x: F.interpolate(x.transpose(1, 2), size=x.shape[1]).transpose(1, 2) * 0.9,
}

#: Each element from the whole batch or row: what a rank that has some of the rows cannot know.
EVERYTHING: dict[str, Step] = {
    "norm of all": lambda x: x / (1.0 + x.norm()),
    "mean of rows": lambda x: x - x.mean(0, keepdim=True),
    "sum of row": lambda x: x * 0.1 + x.mean((1, 2), keepdim=True),
}

STEPS: dict[str, Step] = {**ELEMENTS, **HIDDEN, **TOKENS, **EVERYTHING}
