"""Models of images whose tokens are split over ranks, from their first block to their last: denoisers, vision transformers.

Outside of the blocks every rank computes the whole image (patches, the output); text and modulation are the same on every rank.
The model's output is whole and the same on every rank. Sum the gradients of parameters over the sequence axes, each rank with its
part of the loss's weight.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from meshfold.kernels.fuse import is_compiled
from meshfold.mesh import LayoutError, Mesh
from meshfold.mesh.collectives import gather
from meshfold.mesh.tracking import tracker, untracked, whole
from meshfold.sequence.joint_attention import ORDER, joint_attention
from meshfold.sequence.sharding import SequenceSharding, sequence_mode, sequence_sharding

MARK = "image_blocks"
"""Attribute of a model that names its list of blocks: in these only attention mixes an image's tokens."""


@dataclass(frozen=True, kw_only=True)
class _Form:
    """Lists of blocks of a kind of model, and the outputs of a block, whose first argument is the image.

    Attributes:
        lists: names of its lists of blocks, in the order of their calls; of several names for one list the model has one.
        output: index of the image in a block's outputs; None: it returns the image alone.
        text: blocks may be given tokens of a text too, and attention has a processor that says where they are.
    """

    lists: tuple[str, ...] = ("transformer_blocks",)
    output: int | None = None
    text: bool = True


_FORMS = {
    "DiTTransformer2DModel": _Form(),
    "SD3Transformer2DModel": _Form(output=1),
    "FluxTransformer2DModel": _Form(lists=("transformer_blocks", "single_transformer_blocks"), output=1),
}
_ENCODERS = {
    name: _Form(lists=("layers", "layer", "encoder.layers", "encoder.layer"), text=False)
    for name in ("ViTModel", "DeiTModel", "Dinov2Model")
}
"""Vision transformers of transformers; releases call the list of blocks by different names."""
_PROCESSORS = {"AttnProcessor2_0": "", "JointAttnProcessor2_0": "behind", "FluxAttnProcessor": "in front"}
"""Attention whose code is known: the place of the text's tokens among the image's."""
_TEXT, _ROTARY = "encoder_hidden_states", "image_rotary_emb"
_QUERIES = ("to_q", "qkv", "q_proj", "query")
"""Names that attention modules give to the projection to queries."""


def find_image_model(model: nn.Module) -> nn.Module | None:
    """Return the trained part of a model that makes tokens of images: a denoiser of diffusers, a vision transformer of
    transformers, or a module with :data:`MARK`; None if it has none.

    Raises:
        LayoutError: for several.
    """
    found: list[nn.Module] = []
    for module in model.modules():
        inner = any(module in other.modules() for other in found)
        if _takes_images(module) and not inner and any(p.requires_grad for p in module.parameters()):
            found.append(module)
    if len(found) > 1:
        names = " and ".join(type(one).__name__ for one in found)
        raise LayoutError(f"{names}: only one trained model of images can have its tokens split; freeze the others")
    return found[0] if found else None


def check_image_tokens(model: nn.Module) -> None:
    """Check that the tokens of a model of images can be split, as far as it shows before a forward.

    Raises:
        LayoutError: for denoisers other than DiTTransformer2DModel, SD3Transformer2DModel and FluxTransformer2DModel, for dropout,
            convolutions in blocks, compiled blocks, and attention of unknown code.
    """
    form = _form_of(model)
    for block in _blocks_of(model):
        _check_block(block, form)


class ImageTokens:
    """Handle of a model whose image tokens are split; ``remove()`` restores it."""

    def __init__(self, model: nn.Module, mesh: Mesh, mode: str) -> None:
        """Args:
        model: passes :func:`check_image_tokens`.
        mesh, mode: as in :func:`meshfold.sequence.joint_attention`.

        Raises:
            LayoutError: if it does not.
        """
        self._mesh, self._mode, self._axes = mesh, mode, sequence_mode(mode, mesh).axes
        self._form = _form_of(model)
        self._sharding: SequenceSharding | None = None  # of the forward that runs
        self._inside, self._text = False, 0
        check_image_tokens(model)
        blocks = _blocks_of(model)
        with ExitStack() as undo:
            undo.callback(model.register_forward_pre_hook(self._begin).remove)
            for block in blocks:
                enter = _BlockEntry(self, inspect.signature(type(block).forward))
                undo.callback(block.register_forward_pre_hook(enter, with_kwargs=True, prepend=True).remove)
                for module in block.modules():
                    if _attends(module):
                        call = _AttentionCall(self, _PROCESSORS[_processor(module)] if self._form.text else None)
                        undo.callback(module.register_forward_pre_hook(call.enter, with_kwargs=True).remove)
                        undo.callback(module.register_forward_hook(call.leave, always_call=True).remove)
            undo.callback(blocks[-1].register_forward_hook(self._leave_blocks).remove)
            self._undo = undo.pop_all()

    def remove(self) -> None:
        """Restore the model."""
        self._undo.close()

    def _begin(self, model: nn.Module, args: Any) -> None:
        self._sharding, self._inside, self._text = None, False, 0

    def enter_block(self, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a block that change: this rank's tokens of the image, which is argument ``name``, and their
        rotary tables."""
        changed: dict[str, Any] = {}
        image, text = given[name], given.get(_TEXT)
        if not self._inside:
            self._sharding = sequence_sharding(image.shape[1], self._mesh, self._mode, ORDER)
            self._inside, changed[name] = True, self._shard(image, 1)
        self._text = text.shape[1] if isinstance(text, Tensor) else 0
        if (rotary := given.get(_ROTARY)) is not None:
            changed[_ROTARY] = tuple(self._rows_of(table) for table in rotary)
        return changed

    def _rows_of(self, table: Tensor) -> Tensor:
        """Return the rows of a rotary table ``(t length) d`` for the text and this rank's tokens."""
        return torch.cat([table[: self._text], self._shard(table[self._text :], 0)])

    def _shard(self, x: Tensor, dim: int) -> Tensor:
        assert self._sharding is not None  # set by the first block
        sharding, rank = self._sharding, self._mesh.index(*self._axes)
        return _marked(x, lambda: sharding.shard(x, rank, dim))

    def _leave_blocks(self, block: nn.Module, args: Any, output: Any) -> Any:
        sharding, self._inside = self._sharding, False
        assert sharding is not None
        place = self._form.output
        image: Tensor = output if place is None else output[place]
        whole = _marked(image, lambda: sharding.join(gather(image, self._mesh, 1, self._axes), 1))
        return whole if place is None else (*output[:place], whole, *output[place + 1 :])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, text: int, behind: bool) -> Tensor:
        """Attend from the text and this rank's tokens of the image: ``b heads (t s) d``, as diffusers calls it."""
        if self._sharding is None:
            raise LayoutError("attention of a model whose image tokens are split was called by itself: call the model")
        image = q.shape[2] - text
        q, k, v = (torch.cat([x[:, :, image:], x[:, :, :image]], 2) if behind and text else x for x in (q, k, v))
        length = self._sharding.length
        out = joint_attention(
            *(x.transpose(1, 2) for x in (q, k, v)),
            text=text,
            length=length,
            mesh=self._mesh,
            mode=self._mode,
            scale=scale,
        ).transpose(1, 2)
        return torch.cat([out[:, :, text:], out[:, :, :text]], 2) if behind and text else out

    @property
    def text(self) -> int:
        """Tokens of the text in the block that was called last."""
        return self._text


class _BlockEntry:
    """Hook before a block."""

    def __init__(self, tokens: ImageTokens, signature: inspect.Signature) -> None:
        self._tokens, self._names = tokens, [*signature.parameters][1:]

    def __call__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        changed = self._tokens.enter_block(self._names[0], given)
        placed = tuple(changed.pop(name, value) for name, value in zip(self._names, args, strict=False))
        return placed, {**kwargs, **changed}


class _AttentionCall:
    """Hooks around an attention module, in whose forward ``scaled_dot_product_attention`` runs over the ranks."""

    def __init__(self, tokens: ImageTokens, where: str | None) -> None:
        """Args:
        where: of a text's tokens, a value of ``_PROCESSORS``; None: there is no text.
        """
        self._tokens, self._open, self._where = tokens, list[_Attention | None](), where

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        other = None if self._where is None else kwargs.get(_TEXT, args[1] if len(args) > 1 else None)
        if isinstance(other, Tensor) and not self._where:
            self._open.append(None)  # from the image to the text, which every rank has
            return
        text = other.shape[1] if isinstance(other, Tensor) else self._tokens.text if self._where == "in front" else 0
        mode = _Attention(self._tokens, text, self._where == "behind")
        mode.__enter__()
        self._open.append(mode)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        mode = self._open.pop() if self._open else None
        if mode is None:
            return
        mode.__exit__(None, None, None)
        if output is not None and not mode.called:
            raise LayoutError(
                f"{type(module).__name__} did not call torch.nn.functional.scaled_dot_product_attention, so each rank saw only its "
                "own tokens: leave a denoiser's attention backend at 'native', load transformers' models with "
                "attn_implementation='sdpa', or use a spec without sequence"
            )


class _Attention(TorchFunctionMode):
    """Function mode in which ``scaled_dot_product_attention`` runs over the ranks."""

    def __init__(self, tokens: ImageTokens, text: int, behind: bool) -> None:
        super().__init__()
        self._tokens, self._text, self._behind = tokens, text, behind
        self.called = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None or dropout_p or is_causal or query.shape[1] != key.shape[1]:
            raise LayoutError(
                "attention with a mask, dropout or fewer heads of keys cannot run over split image tokens: leave it out, or use a "
                "spec without sequence"
            )
        self.called = True
        return _marked(query, lambda: self._tokens.attend(query, key, value, scale, self._text, self._behind))


def _form_of(model: nn.Module) -> _Form:
    marked = getattr(model, MARK, None)
    if isinstance(marked, str):
        return _Form(lists=(marked,), text=False)
    forms = {**_FORMS, **_ENCODERS}
    kind = next((kind.__name__ for kind in type(model).__mro__ if kind.__name__ in forms), "")
    if not kind:
        raise LayoutError(
            f"{type(model).__name__} mixes image tokens outside of attention, or calls its blocks in an unknown way: of "
            f"diffusers' models {', '.join(_FORMS)} can have theirs split. Use a spec without sequence"
        )
    return forms[kind]


def _blocks_of(model: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    for name in _form_of(model).lists:
        try:
            found += model.get_submodule(name).children()
        except AttributeError:  # another release's name
            continue
    if not found:
        names = " or ".join(_form_of(model).lists)
        raise LayoutError(f"{type(model).__name__} has no blocks in {names}: use a spec without sequence")
    return found


def _takes_images(module: nn.Module) -> bool:
    """Return True for models of diffusers, for the vision transformers whose form is known, and for marked modules."""
    if isinstance(getattr(module, MARK, None), str):
        return True
    kinds = [(kind.__name__, kind.__module__.partition(".")[0]) for kind in type(module).__mro__]
    return ("ModelMixin", "diffusers") in kinds or any((name, "transformers") in kinds for name in _ENCODERS)


def _attends(module: nn.Module) -> bool:
    return any(isinstance(getattr(module, name, None), nn.Module) for name in _QUERIES)


def _processor(module: nn.Module) -> str:
    return type(getattr(module, "processor", None)).__name__


def _check_block(block: nn.Module, form: _Form) -> None:
    if not any(_attends(module) for module in block.modules()):
        raise LayoutError(
            f"no attention was found in {type(block).__name__}, whose image tokens are to be split: call the projection to queries "
            f"{' or '.join(_QUERIES)}"
        )
    for name, module in block.named_modules():
        if isinstance(module, nn.modules.conv._ConvNd):
            raise LayoutError(
                f"{type(block).__name__}.{name}, a {type(module).__name__}, mixes tokens: use a spec without sequence"
            )
        if form.text and _attends(module) and _processor(module) not in _PROCESSORS:
            raise LayoutError(
                f"{type(block).__name__}.{name} attends by {_processor(module)}, whose order of text and image tokens is "
                f"unknown: use one of {', '.join(_PROCESSORS)}, or a spec without sequence"
            )
        if is_compiled(module):
            raise LayoutError(
                f"{type(block).__name__} is compiled, and its image tokens cannot be split: leave compile out"
            )
        p = getattr(module, "p", 0.0)
        if "Dropout" in type(module).__name__ and isinstance(p, float) and p > 0:
            raise LayoutError(
                f"{type(block).__name__}.{name} drops with p={p}: with split image tokens, ranks would drop other elements than "
                "one process: set the model's dropout to 0, or use a spec without sequence"
            )
        if isinstance(p := getattr(module, "attention_dropout", 0.0), float) and p > 0:
            raise LayoutError(
                f"{type(block).__name__}.{name} drops weights of attention with p={p}: set the model's attention dropout to 0, or "
                "use a spec without sequence"
            )


def _marked(like: Tensor, make: Callable[[], Tensor]) -> Tensor:
    """Return what ``make`` returns, with the tracked layout of ``like``: splitting tokens leaves the split of its other dims."""
    found = tracker()
    if found is None:
        return make()
    dims = found.dims(like)
    with untracked():
        made = make()
    sizes = zip(dims, made.shape, like.shape, strict=True)
    found.mark(made, tuple(dim if size == before else whole(size) for dim, size, before in sizes))
    return made
