"""Functional code that users write on the residual stream ``b t h``, each a function of it that keeps its shape."""

from __future__ import annotations

import math
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


def _seeded(*sizes: int) -> Tensor:
    return torch.rand(*sizes, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


#: Sizes that are read and computed with, views that name them, and random numbers. Of the batch's size nothing is made: a rank of
#: a data axis has fewer rows than one process.
SIZES: dict[str, Step] = {
    "over h": lambda x: x / x.shape[-1],
    "mean of h by hand": lambda x: x - x.sum(-1, keepdim=True) / x.shape[-1],
    "times h": lambda x: x * (2 * x.shape[-1]) * 0.01,
    "float times h": lambda x: x * (0.05 * x.shape[-1]),
    "root of h": lambda x: x / math.sqrt(x.size(-1)),
    "half of h": lambda x: x * (x.shape[-1] // 2 + 1) * 0.1,
    "ones of h": lambda x: x * torch.ones(x.shape[-1], dtype=x.dtype).sum() * 0.1,
    "ones along h": lambda x: x * torch.ones(x.shape[-1], dtype=x.dtype) * 0.7,
    "over t": lambda x: x / x.shape[1],
    "mean of t by hand": lambda x: x - x.sum(1, keepdim=True) / x.shape[1],
    "elements of a row": lambda x: x * x[0].numel() * 0.01,
    "mean of places": lambda x: x * torch.arange(x.shape[1], dtype=x.dtype).mean() * 0.2,
    "zeros of a row": lambda x: x * 0.9 + x.new_zeros(x.shape[1:]),
    "named rows": lambda x: torch.tanh(x.reshape(x.shape[0] * x.shape[1], -1)).view(x.shape),
    "turned rows": lambda x: x.transpose(0, 1).flatten(0, 1).sin().unflatten(0, (x.shape[1], -1)).transpose(0, 1),
    "features of a row": lambda x: x.flatten(1).sin().view(x.shape),
    "all tokens": lambda x: x[:, : x.shape[1]] * 0.9,
    "first four": lambda x: x + x[:, :4].mean(1, keepdim=True),
    "first two": lambda x: x + x[:, :2].amax(1, keepdim=True),
    "last two": lambda x: x + x[..., -2:].sum(-1, keepdim=True),
    "first chunk": lambda x: x + x.chunk(2, 1)[0].mean(1, keepdim=True),
    "einsum scores": lambda x: torch.einsum("bth,bsh->bts", x, x).softmax(-1) @ x,
    "einsum dots": lambda x: x * torch.einsum("bth,bth->bt", x, x)[..., None] * 0.1,
    "linear": lambda x: F.linear(x, 0.1 * torch.ones(x.shape[-1], x.shape[-1], dtype=x.dtype)),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "noise of nothing": lambda x: x + 0.0 * torch.rand_like(x),
    "seeded noise of h": lambda x: x * (0.5 + _seeded(x.shape[-1])),
    "seeded noise of t": lambda x: x * (0.5 + _seeded(x.shape[1], 1)),
    "seeded number": lambda x: x * (0.5 + _seeded(1)),
    "number of nothing": lambda x: x + 0.0 * torch.rand(()),
}

STEPS: dict[str, Step] = {**ELEMENTS, **HIDDEN, **TOKENS, **EVERYTHING, **SIZES}
