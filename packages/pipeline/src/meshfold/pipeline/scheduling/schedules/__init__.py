"""The schedules by name. Each is a function of ranks and micro-batches to a list of actions for every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from meshfold.pipeline.scheduling.actions import Action
from meshfold.pipeline.scheduling.schedules.gpipe import gpipe
from meshfold.pipeline.scheduling.schedules.hanayo import hanayo
from meshfold.pipeline.scheduling.schedules.interleaved import interleaved
from meshfold.pipeline.scheduling.schedules.one_forward_one_backward import one_forward_one_backward
from meshfold.pipeline.scheduling.schedules.v_shaped import dualpipe_v, zb_v
from meshfold.pipeline.scheduling.schedules.zero_bubble import zb_h1, zb_h2

Maker = Callable[..., list[list[Action]]]

SCHEDULES: Mapping[str, Maker] = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": one_forward_one_backward,
        "interleaved": interleaved,
        "zb-h1": zb_h1,
        "zb-h2": zb_h2,
        "zb-v": zb_v,
        "hanayo": hanayo,
        "dualpipe-v": dualpipe_v,
    }
)
"""Every schedule with a name; ``auto`` is searched, not written (:mod:`meshfold.pipeline.scheduling.search`)."""
