"""Weights in fp8, cast once an optimizer step: by the first product that reads them, for all micro-batches and recomputed forwards.

Compiled blocks take the operands as inputs of their graphs, so the weights of a block are cast in front of its forward, behind the
hooks that wait for an optimizer step or gather parameters. Cast weights are freed when the step ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.engine.model.compile_blocks import CompiledBlocks
from meshfold.engine.model.fp8_linear import WEIGHT
from meshfold.engine.precision.fp8 import Fp8Settings
from meshfold.kernels import Fp8Weight, fp8_cast_weight
from meshfold.mesh import ParallelSpec, SpecError
from meshfold.mesh.spec import ZeroSpec

_TWO_BYTES = 2  # an element in both operands


def casts_once(settings: Fp8Settings, spec: ParallelSpec, accumulation: int) -> bool:
    """Return True if weights are cast once a step, not at each use.

    Args:
        settings: of fp8; without ``cast`` weights are cast once if micro-steps or micro-batches use them several times.
        spec: under which.
        accumulation: micro-steps of an optimizer step.

    Raises:
        SpecError: for ``cast="step"`` if ``zero`` lets weights go between two uses, or may.
    """
    zero = spec.zero
    stays = zero is None or (zero.stage < 3 and zero.placement == "cuda")
    if settings.cast == "step" and not stays:
        has = f"stage={zero.stage}, placement={zero.placement!r}"  # type: ignore[union-attr]
        raise SpecError(
            f"precision=dict(matmul='fp8', cast='step') with zero=dict({has}): weights that are cast once stay on every rank, two "
            "bytes an element, but these are sharded or moved. Leave cast out, or write zero=dict(stage=2, placement='cuda')"
        )
    micro_batches = 1 if spec.pipeline is None else spec.pipeline.microbatches or spec.pipeline.size
    several = accumulation * micro_batches > 1
    return stays and (settings.cast == "step" or (settings.cast is None and several))


def fp8_cast_bytes(model: nn.Module, settings: Fp8Settings | None, spec: ParallelSpec, accumulation: int) -> int:
    """Return the bytes of fp8 weights during a step, without their scales, in a model with fp8 layers."""
    if settings is None or not casts_once(settings, spec, accumulation):
        return 0
    weights = [layer.get_parameter("weight") for layer in model.modules() if _weight(layer) is not None]
    return sum(_TWO_BYTES * weight.numel() for weight in weights)


def fp8_gathered(
    model: nn.Module, settings: Fp8Settings | None, zero: ZeroSpec | None, gather: str | None = None
) -> dict[Tensor, Fp8Weight]:
    """Return the weights that ``zero`` stage 3 gathers in fp8, in a model whose layers are in fp8, with what multiplies them.

    They are those of layers in fp8 that no other module has. Tiles of ``block128`` and weights that a tensor mode gathers
    for each product travel in bf16.

    Args:
        model: with layers in fp8.
        settings: theirs.
        zero: the spec's entry.
        gather: in place of ``settings.gather``.
    """
    if (
        settings is None
        or (gather or settings.gather) != "fp8"
        or zero is None
        or zero.stage < 3
        or settings.recipe.block
    ):
        return {}
    holders = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    found: dict[Tensor, Fp8Weight] = {}
    for name, layer in model.named_modules():
        weight = _weight(layer)
        if weight is not None and holders[id(layer.get_parameter("weight"))] == 1:
            weight.name = f"{name}.weight"
            found[layer.get_parameter("weight")] = weight
    return found


class Fp8Weights:
    """The weights that a model's layers multiply in fp8."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        """Args:
        layers: those in fp8, by name.
        """
        self._layers = layers
        self._hooks: list[Any] = []

    @property
    def casts(self) -> dict[str, int]:
        """Numbers of casts of each layer's weight for several products, by name."""
        return {name: weight.casts for name, layer in self._layers.items() if (weight := _weight(layer)) is not None}

    def watch(self, compiled: CompiledBlocks | None) -> None:
        """Cast the weights of compiled blocks before their forwards, compiled. Call it after all other hooks are registered."""
        if compiled is None:
            return
        cast = torch.compile(fp8_cast_weight, backend=compiled.backend)
        for block in compiled.blocks.values():
            inside = {id(module) for module in block.modules()}
            layers = [layer for layer in self._layers.values() if id(layer) in inside]
            for layer in layers:
                if (weight := _weight(layer)) is not None:
                    weight.cast = cast
            self._hooks.append(block.register_forward_pre_hook(_before(layers)))

    def open(self) -> None:
        """Keep weights cast from now on; called at the start of an optimizer step."""
        self._each(Fp8Weight.open)

    def close(self) -> None:
        """Release the cast weights, before weights change."""
        self._each(Fp8Weight.close)

    def remove(self) -> None:
        """Remove the hooks and release the cast weights."""
        self.close()
        while self._hooks:
            self._hooks.pop().remove()

    def _each(self, do: Callable[[Fp8Weight], None]) -> None:
        for layer in self._layers.values():
            if (weight := _weight(layer)) is not None:
                do(weight)


def _weight(layer: nn.Module) -> Fp8Weight | None:
    found: Fp8Weight | None = layer.__dict__.get(WEIGHT)
    return found


def _before(layers: list[nn.Module]) -> Callable[..., None]:
    def before(module: nn.Module, args: Any) -> None:
        for layer in layers:
            if (weight := _weight(layer)) is not None:
                weight.refresh(layer.weight)  # type: ignore[arg-type]

    found: Callable[..., None] = torch.compiler.disable(before)
    return found
