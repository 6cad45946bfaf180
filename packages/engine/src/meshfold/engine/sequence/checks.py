"""Refusals of models whose sequences cannot be split, as far as possible before they run."""

from __future__ import annotations

from torch import nn

from meshfold.engine.world import World
from meshfold.mesh import LayoutError, SpecError
from meshfold.mesh.spec import SequenceSpec
from meshfold.tensor_parallel import find_mode
from meshfold.tensor_parallel.convert import find_functional_dropout
from meshfold.tensor_parallel.layers import PatchEmbedding

_HEADS = ("num_attention_heads", "n_head", "heads")
_ATTENDING = (
    "full_attention",
    "sliding_attention",
    "attention",
)  # names in transformers of layers that communicate over ranks


def check_given(model: nn.Module, world: World, *, own_loss: bool) -> None:
    """Refuse a module before anything is split, so that it stays unchanged.

    Args:
        model: as passed by the user.
        world: where it will lie.
        own_loss: the engine has a ``loss_fn``.

    Raises:
        SpecError: for layers that mix tokens, and for a loss inside the model that ranks cannot share.
    """
    spec = world.spec.sequence
    if spec is None or spec.size == 1:
        return
    written = world.spec.written or str(world.spec)
    if _splits_image(model, written):
        if found := _heads(model, world, spec):
            raise SpecError(f"{written}: {found}")
        return
    if found := _layers(model):
        raise SpecError(f"{written}: {found}")
    if not own_loss:
        from meshfold.engine.sequence.incoming import (
            Labels,
        )  # imports meshfold.sequence, which may not be installed

        Labels(model, written).require(type(model).__name__)


def _splits_image(model: nn.Module, written: str) -> bool:
    """Return True for a model of images, of which only the tokens are split, and only in its blocks."""
    from meshfold.sequence import check_image_tokens, find_image_model

    try:
        if (found := find_image_model(model)) is None:
            return False
        check_image_tokens(found)
    except LayoutError as error:
        raise SpecError(f"{written}: {error}") from error
    return True


def check_mixing(model: nn.Module, world: World) -> None:
    """Look for code that would see only its own rank's tokens, and for heads that ranks cannot share.

    Args:
        model: of all layers: one in stages before it is cut, so that every rank sees the same.
        world: where it lies; without split sequences nothing is looked for.

    Raises:
        SpecError: for any of them.
    """
    spec = world.spec.sequence
    if spec is None or spec.size == 1:  # also of Megatron's mode
        return
    written = world.spec.written or str(world.spec)
    found = _mixing(model, spec.mode) or _heads(model, world, spec)
    if found:
        raise SpecError(f"{written}: {found}")


def _mixing(model: nn.Module, mode: object) -> str:
    config = getattr(model, "config", None)
    for name, value in getattr(config, "__dict__", {}).items():
        drops = "drop" in name and "att" in name and isinstance(value, float) and value > 0
        if drops and callable(mode):
            return f"the model's {name}={value!r}: the model's own attention cannot be told which weights to drop. Set it to 0.0"
        if drops and find_functional_dropout(model) is None:
            return (
                f"the model's {name}={value!r}: mode 1d cannot place the model's layers, so its dropout is torch's own and "
                "would drop other elements than a single process. Set it to 0.0"
            )
    others = sorted(set(getattr(config, "layer_types", None) or ()) - set(_ATTENDING))
    if others:
        return (
            f"the model has layers of type {', '.join(others)}, and only attention can see the tokens of other ranks: use a spec "
            "without sequence"
        )
    return _layers(model)


def _layers(model: nn.Module) -> str:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.conv._ConvNd | nn.RNNBase | PatchEmbedding):
            kind = "Conv2d" if isinstance(module, PatchEmbedding) else type(module).__name__
            return (
                f"{name}, a {kind}, mixes tokens, and only attention can see those of other ranks: use a spec "
                "without sequence"
            )
        if isinstance(module, nn.MultiheadAttention):
            return (
                f"{name}, an nn.MultiheadAttention, attends in a way that cannot be carried out over ranks: write the attention "
                "with torch.nn.functional.scaled_dot_product_attention, or use a spec without sequence"
            )
    return ""


def _heads(model: nn.Module, world: World, spec: SequenceSpec) -> str:
    from meshfold.sequence import kv_head_repeats, sequence_mode

    config = getattr(model, "config", None)
    ulysses = world.mesh.size(*sequence_mode(spec.mode, world.mesh).ulysses)
    heads = next((getattr(config, name) for name in _HEADS if isinstance(getattr(config, name, None), int)), 0)
    if not heads or ulysses == 1:
        return ""
    split = 1
    if world.mode is not None:
        split = world.mesh.size(*find_mode(world.mode).layout("hidden")["n"])  # type: ignore[arg-type]
    try:
        kv_head_repeats(heads // split, 1, ulysses)
    except LayoutError as error:
        return f"a rank has {heads // split} of {heads} heads, and {error}" if split > 1 else str(error)
    return ""
