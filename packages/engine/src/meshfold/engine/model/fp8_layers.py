"""Linear layers that multiply in fp8: which of a model's do, and why the others stay in bf16.

A layer's class is changed, not its forward: blocks of one class still share their compiled code, and names, parameters and state
dicts do not change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from meshfold.engine.model.fp8_linear import Fp8Products, is_plain_linear, use_fp8_products
from meshfold.engine.model.fp8_weights import Fp8Weights, casts_once, fp8_gathered
from meshfold.engine.precision.fp8 import KEEP, Fp8Settings
from meshfold.engine.world import World
from meshfold.kernels import FP8_SOURCE, Fp8Source, fp8_gain
from meshfold.mesh import SpecError, did_you_mean
from meshfold.tensor_parallel import Linear, bind_fp8_maximum

_HEADS = ("head", "lm_head", "embed_out", "score", "classifier", "classification_head", "qa_outputs")
_ROUTERS = ("router", "gate", "gating", "shared_expert_gate")
_EXPERTS = "experts"


@dataclass(kw_only=True)
class Fp8Layers:
    """The linear layers of a model that multiply in fp8; printed in a few lines.

    Attributes:
        recipe: its name.
        layers: names of the layers in fp8.
        kept: for each linear layer that stays in bf16 the reason.
        weights: those that are cast once a step; None: each use casts.
        gathered: number of the weights that ``zero`` gathers in fp8.
    """

    recipe: str
    layers: tuple[str, ...] = ()
    kept: dict[str, str] = field(default_factory=dict)
    weights: Fp8Weights | None = None
    gathered: int = 0
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def __str__(self) -> str:
        """Return a line that lists the layers in fp8, and one for each reason to stay in bf16."""
        lines = [f"fp8 ({self.recipe}): {_listed(self.layers)}"]
        if self.weights is not None:
            lines.append("weights are cast once a step")
        if self.gathered:
            which = "their weights" if self.gathered == len(self.layers) else f"{self.gathered} of their weights"
            lines.append(f"zero gathers {which} in fp8")
        for why in dict.fromkeys(self.kept.values()):
            lines.append(f"bf16: {_listed([name for name, each in self.kept.items() if each == why])}: {why}")
        return "\n".join(lines)

    def close(self) -> None:
        """Switch every layer back to its own dtype."""
        if self.weights is not None:
            self.weights.remove()
        while self._undo:
            self._undo.pop()()


def check_fp8(world: World, settings: Fp8Settings) -> None:
    """Check that layers can multiply in fp8 under a spec.

    Args:
        world: whose spec it is.
        settings: of the layers.

    Raises:
        SpecError: with an overlap of collectives and matmuls that sends an operand in pieces, or ``gather="fp8"`` where nothing is
            gathered in fp8.
    """
    tensor, zero = world.spec.tensor, world.spec.zero
    if settings.gather == "fp8" and settings.recipe.block:
        raise SpecError(
            f"precision=dict(matmul='fp8', gather='fp8', recipe={settings.recipe.name!r}): tiles are gathered in bf16. Leave "
            "gather out, or write recipe='rowwise'"
        )
    if settings.gather == "fp8" and (zero is None or zero.stage < 3 or zero.placement not in ("cuda", "auto")):
        raise SpecError(
            "precision=dict(matmul='fp8', gather='fp8'): only zero stage 3 gathers weights, and in fp8 those on the device. Leave "
            "gather out, or write zero=dict(stage=3, placement='cuda')"
        )
    if tensor is not None and tensor.overlap in ("stream", "ring", "push"):
        raise SpecError(
            f"precision=dict(matmul='fp8') with overlap={tensor.overlap!r}: it multiplies operands piece by piece, but the fp8 "
            "scale of a row needs the whole row. Leave overlap out, or write overlap='auto': fp8 matmuls then gather their "
            "operands, and the others use the fastest way"
        )


def use_fp8(model: nn.Module, settings: Fp8Settings, world: World, *, accumulation: int = 1) -> Fp8Layers:
    """Switch a model's linear layers to fp8 products, in place; all ranks must call.

    Args:
        model: this rank's part.
        settings: of fp8.
        world: its ranks.
        accumulation: micro-steps of an optimizer step.

    Raises:
        SpecError: for a name in ``keep`` that matches no layer, or ``cast="step"`` for weights that do not stay.
    """
    once = casts_once(settings, world.spec, accumulation)
    _check_names(model, settings)
    found = Fp8Layers(recipe=settings.recipe.name)
    split = world.spec.tensor is not None and world.spec.tensor.size > 1
    heads = _output_weights(model)
    outer = (
        world.outer_axes if settings.scales == "all" else ()
    )  # axes that split the tokens over which an amax is taken
    reduced = None if world.mesh.size(*outer) == 1 else bind_fp8_maximum(world.mesh, None, outer)
    products = Fp8Products.bind(settings.recipe, reduced)
    narrow, multiple = settings.keeps_narrow(world.device), settings.recipe.multiple
    layers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if not isinstance(module, Linear | nn.Linear):
            continue
        why = _kept_by_name(name, module, settings, heads)
        if isinstance(module, Linear):
            why = (
                why or module.fp8_refusal(settings.recipe) or (_narrow(*module.multiplied, settings) if narrow else "")
            )
            if not why:
                module.use_fp8(settings.recipe, outer)
                found._undo.append(lambda layer=module: layer.use_fp8(None))  # type: ignore[misc]
        else:
            why = why or ("tensor parallelism does not split it" if split else "")
            why = why or (
                "" if is_plain_linear(module) else f"its class, {type(module).__name__}, has a forward of its own"
            )
            if not why and (module.in_features % multiple or module.out_features % multiple):
                why = f"its width is no multiple of {multiple}"
            why = why or (_narrow(module.out_features, module.in_features, settings) if narrow else "")
            if not why:
                found._undo.append(use_fp8_products(module, products))
        if why:
            found.kept[name] = why
        else:
            layers[name] = module
    found.layers = tuple(layers)
    if layers:
        found._undo.append(_notice_readers(model))
    found.gathered = len(fp8_gathered(model, settings, world.spec.zero)) if world.data_size > 1 else 0
    found.weights = Fp8Weights(layers) if once and layers else None
    return found


def _notice_readers(model: nn.Module) -> Callable[[], None]:
    """Let norms and activations notice which of their results fp8 layers read. Return what undoes it."""
    makers = [module for module in model.modules() if not isinstance(module, Linear | nn.Linear)]
    for module in makers:
        module.__dict__[FP8_SOURCE] = Fp8Source()

    def forget() -> None:
        for module in makers:
            module.__dict__.pop(FP8_SOURCE, None)

    return forget


def _kept_by_name(name: str, module: nn.Module, settings: Fp8Settings, heads: set[int]) -> str:
    """Return why a layer stays in bf16 regardless of its shape; empty if there is no reason."""
    leaf, parts = name.rpartition(".")[2], name.split(".")
    is_head = leaf in _HEADS or id(module.weight) in heads or (isinstance(module, Linear) and module.makes_logits)
    if "head" in settings.keep and is_head:
        return "keep='head'"
    if "router" in settings.keep and leaf in _ROUTERS:
        return "keep='router'"
    for entry in settings.keep:
        if entry != "narrow" and _has(parts, entry):
            return f"keep={entry!r}"
    return "an expert, which not every rank calls" if _EXPERTS in parts else ""


def _narrow(n: int, k: int, settings: Fp8Settings) -> str:
    """Return why a layer with these local outputs and inputs stays in bf16; empty if fp8 saves time."""
    if fp8_gain(n, k, settings.recipe) > 0:
        return ""
    return f"keep='narrow': its casts to fp8 take longer than its matmuls gain ({n} x {k} on a rank)"


def _has(parts: list[str], entry: str) -> bool:
    """Return True if a name contains an entry's parts one after another."""
    wanted = entry.split(".")
    return any(parts[i : i + len(wanted)] == wanted for i in range(len(parts) - len(wanted) + 1))


def _check_names(model: nn.Module, settings: Fp8Settings) -> None:
    names = [name.split(".") for name, _ in model.named_modules()]
    for entry in settings.keep:
        if entry not in KEEP and not any(_has(parts, entry) for parts in names):
            known = {part: None for parts in names for part in parts if part and not part.isdigit()}
            raise SpecError(
                f"precision=dict(keep={settings.keep!r}): no layer is called {entry!r}.{did_you_mean(entry, known)} An entry "
                "is 'head', 'router', 'narrow', or a part of a layer's name, as in 'blocks.0' or 'down'"
            )


def _output_weights(model: nn.Module) -> set[int]:
    """Return the ids of output weights: the Hugging Face model's head, and weights shared with an embedding."""
    tied = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    asked: Any = getattr(model, "get_output_embeddings", lambda: None)()
    return tied if asked is None else tied | {id(asked.weight)}


def _listed(names: tuple[str, ...] | list[str]) -> str:
    if not names:
        return "no linear layer"
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
