"""Random numbers that are the same under every layout: by global element, and for each call of dropout."""

from __future__ import annotations

from meshfold.mesh.random.dropout import (
    Dealt,
    DropoutStream,
    checkpoint_contexts,
    current_dropout_stream,
    deal_tokens,
    dropout_stream,
    next_draw,
)
from meshfold.mesh.random.numbers import (
    fill_normal_,
    fill_truncated_normal_,
    fill_uniform_,
    key_of,
    normal,
    random_bits,
    stream_state,
    uniform,
)

__all__ = [
    "Dealt",
    "DropoutStream",
    "checkpoint_contexts",
    "current_dropout_stream",
    "deal_tokens",
    "dropout_stream",
    "fill_normal_",
    "fill_truncated_normal_",
    "fill_uniform_",
    "key_of",
    "next_draw",
    "normal",
    "random_bits",
    "stream_state",
    "uniform",
]
