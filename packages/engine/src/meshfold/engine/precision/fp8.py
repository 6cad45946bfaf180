"""The keys of ``precision=dict(name="bf16", matmul="fp8", ...)``, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from meshfold.kernels import FP8_RECIPES, Fp8Recipe
from meshfold.mesh import SpecError, did_you_mean

FP8_KEYS = ("matmul", "recipe", "scales", "keep", "cast", "gather", "dispatch")
KEEP = ("head", "router", "narrow")
CASTS = ("step", "use")
GATHERS = ("fp8", "bf16")
SCALES = ("all", "rank")
_RECIPE = "rowwise_hp_dw"


@dataclass(frozen=True, kw_only=True)
class Fp8Settings:
    """Settings of linear layers that multiply in fp8.

    Attributes:
        recipe: scales and formats of the three products.
        scales: over whose tokens the amax of x and dy is taken: ``"all"``, those of all ranks, or ``"rank"``, this rank's own.
        keep: layers that stay in bf16: ``"head"``, ``"router"``, ``"narrow"`` (those in which fp8 costs time, by
            :func:`meshfold.kernels.fp8_gain`), or parts of names such as ``"blocks.0"``.
        cast: when weights are cast: ``"step"``, once an optimizer step, which holds two more bytes an element of a weight;
            ``"use"``, at each use; None: once a step where micro-steps or micro-batches use them several times and they stay on the
            device.
        gather: in what ``zero`` stage 3 gathers weights that only products in fp8 read: ``"bf16"`` or ``"fp8"``.
        dispatch: tokens travel to the experts of other ranks in fp8, with a scale each.
        asked: whether the user has written ``keep``; else ``"narrow"`` counts on GPUs alone.
    """

    recipe: Fp8Recipe = FP8_RECIPES[_RECIPE]
    scales: str = "all"
    keep: tuple[str, ...] = KEEP
    cast: str | None = None
    gather: str = "bf16"
    dispatch: bool = False
    asked: bool = False

    def keeps_narrow(self, device: torch.device) -> bool:
        """Return True if layers stay in bf16 that would lose time on a device; no layer gains time on a CPU."""
        return "narrow" in self.keep and (self.asked or device.type != "cpu")

    @classmethod
    def parse(cls, value: object, name: str, keys: Mapping[str, Any]) -> Fp8Settings | None:
        """Parse the keys of a precision; None if it does not multiply in fp8.

        Args:
            value: the precision as it was written.
            name: of the precision.
            keys: the keys among :data:`FP8_KEYS` that it has.

        Raises:
            SpecError: for fp8 with a precision other than bf16, an unknown recipe or word, or keys without ``matmul``.
        """
        if not keys:
            return None
        if name != "bf16":
            raise SpecError(
                f"precision={value!r}: fp8 matmuls need a model in bf16: write dict(name='bf16', matmul='fp8')"
            )
        if "matmul" not in keys:
            raise SpecError(f"precision={value!r}: {', '.join(keys)} without matmul: add matmul='fp8', or leave it out")
        if keys["matmul"] != "fp8":
            raise SpecError(
                f"precision={value!r}: matmul={keys['matmul']!r}: write matmul='fp8', or leave it out for bf16"
            )
        recipe = keys.get("recipe", _RECIPE)
        if not isinstance(recipe, str) or recipe not in FP8_RECIPES:
            hint = did_you_mean(recipe, FP8_RECIPES) if isinstance(recipe, str) else ""
            raise SpecError(
                f"precision={value!r}: there is no recipe {recipe!r}.{hint} Known: {', '.join(FP8_RECIPES)}"
            )
        scales = keys.get("scales", cls.scales)
        if scales not in SCALES:
            raise SpecError(
                f"precision={value!r}: scales={scales!r}: write 'all' (a scale over tokens is of all ranks' tokens) or 'rank' (of "
                "this rank's, without a message), or leave it out"
            )
        keep = keys.get("keep", cls.keep)
        if isinstance(keep, str) or not isinstance(keep, tuple | list) or not all(isinstance(k, str) for k in keep):
            raise SpecError(f"precision={value!r}: give keep a tuple of layer names, as in keep=('head', 'router')")
        cast = keys.get("cast")
        if cast is not None and cast not in CASTS:
            raise SpecError(
                f"precision={value!r}: cast={cast!r}: write 'step' (weights are cast once an optimizer step) or 'use' (at each "
                "use), or leave it out"
            )
        gather = keys.get("gather", cls.gather)
        if gather not in GATHERS:
            raise SpecError(
                f"precision={value!r}: gather={gather!r}: write 'fp8' or 'bf16' (in which zero stage 3 gathers weights that fp8 "
                "layers multiply), or leave it out"
            )
        dispatch = keys.get("dispatch", "bf16")
        if dispatch not in ("fp8", "bf16"):
            raise SpecError(
                f"precision={value!r}: dispatch={dispatch!r}: write 'fp8' (in which tokens travel to experts) or leave it out"
            )
        return cls(
            recipe=FP8_RECIPES[recipe],
            scales=scales,
            keep=tuple(keep),
            cast=cast,
            gather=gather,
            dispatch=dispatch == "fp8",
            asked="keep" in keys,
        )
