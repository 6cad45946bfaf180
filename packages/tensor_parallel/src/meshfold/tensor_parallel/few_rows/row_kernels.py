"""A single running sequence: norms, products and activations of its one row in few kernels.

Rules, not a class for each model, find these modules: linear layers, an RMSNorm before the only layers that read it, and gated
MLPs, under the names in our models and in transformers'. While :class:`RowKernels` is entered, the forward of such a norm returns
its input, and the layers after it include the norm in their product. Inputs with more than one row run as before. Names prove
nothing: the code that makes the kernels compares a row with and without them (``PagedForward``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.kernels import RowCall, RowWeight, packed_weight_of, row_product
from meshfold.mesh import all_reduce
from meshfold.mesh.parameters import metadata
from meshfold.tensor_parallel.layers import Linear

_NORMED = (
    ("norm1", ("attn.qkv",)),
    ("norm2", ("mlp.gate_up",)),
    ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
)
"""A norm in a block, and the layers that read it and nothing else."""
_GATED = (("gate_up", "gate_up", "down"), ("gate_proj", "up_proj", "down_proj"))
"""Layers of an MLP: gate, up (or both in one) and down."""
ENDS = ("attn.out", "mlp.down")
"""Layers whose output a block of ours adds to the stream."""


@contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Context manager: modules run these forwards inside, then their own again."""
    before = {module: vars(module).get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module, own in before.items():
            if own is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = own


def ranks_of(model: nn.Module) -> int | None:
    """Return how many ranks a model is for, which may be a part of the job's; None if its parameters say nothing of it."""
    known = (metadata(parameter) for parameter in model.parameters())
    return max((meta.mesh.world_size for meta in known if meta is not None), default=None)


class RowKernels:
    """The layers of a model that the kernels take.

    Attributes:
        ranks: of the model; None if they are not known.
    """

    def __init__(self, model: nn.Module, head: nn.Module | None, *, split_norms: bool = True) -> None:
        """Args:
        model: its linear layers may be split over ranks.
        head: makes logits; None if it is not known.
        split_norms: products of split layers compute the norm before them, too. Else the sum before it does.
        """
        self.ranks = ranks_of(model)
        self._split_norms = split_norms
        self._forwards: dict[nn.Module, Callable[..., Any]] = {}
        self._norms: dict[nn.Module, nn.Module] = {}  # of each layer that takes one into its product
        self._gated: dict[nn.Module, tuple[str, ...]] = {}  # names of the layers of MLPs
        for block in model.modules():
            for name, readers in _NORMED:
                self._take_norm(block, name, readers)
        # The last norm is the one beside, or beside the base of, the head.
        for base in (model, getattr(model, "model", None)):
            norm = getattr(base, "norm", None)
            if (
                head is not None
                and isinstance(norm, nn.Module)
                and _layer(head) is not None
                and gain_of(norm) is not None
            ):
                self._norms[head] = norm
        for module in model.modules():
            if _layer(module) is not None:
                self._forwards[module] = partial(self._linear, module)
            elif isinstance(module, Linear) and sharded_layer(module) is not None:
                self._forwards[module] = partial(self._sharded, module)
        for module in model.modules():
            names = next((names for names in _GATED if _multiplies(module, names)), None)
            if names is not None and _gates_by_silu(module):
                self._forwards[module] = partial(self._gated_mlp, module, names)
                self._gated[module] = names
        for norm in set(self._norms.values()):
            self._forwards[norm] = as_given
        self._added: dict[nn.Module, Tensor] = {}  # the stream, for a layer that adds it to its output
        for block in model.modules():
            if is_own_block(block) and all(_layer(submodule(block, path)) is not None for path in ENDS):
                self._forwards[block] = partial(own_block, self._added, block)
            if _is_own_rotary(block):
                self._forwards[block] = _Tables(block)

    def __bool__(self) -> bool:
        return bool(self._forwards)

    def entered(self) -> AbstractContextManager[None]:
        """Return a context manager in which the layers compute by these kernels."""
        return replaced_forwards(self._forwards)

    def calls(self) -> list[RowCall]:
        """Return the products of one row that the model makes with its weights on this rank."""
        pairs = [(mlp, [getattr(mlp, name) for name in names[:2]]) for mlp, names in self._gated.items()]
        inside = {layer for _, layers in pairs for layer in layers}
        found: list[RowCall | None] = [self._gate_call(mlp) for mlp, _ in pairs]
        for module in self._forwards:  # in one order on all ranks
            if module in inside:
                continue
            known, norm = _operands(module), self._norms.get(module)
            found.append(None if known is None else RowCall(known, norm=None if norm is None else gain_of(norm)))
        return [call for call in found if call is not None]

    def _take_norm(self, block: nn.Module, name: str, readers: tuple[str, ...]) -> None:
        norm = getattr(block, name, None)
        if not isinstance(norm, nn.Module) or gain_of(norm) is None:
            return
        layers = [submodule(block, reader) for reader in readers]
        is_taken = _reads_rows if self._split_norms else _is_plain
        if all(layer is not None and is_taken(layer) for layer in layers):
            self._norms.update({layer: norm for layer in layers if layer is not None})

    def _linear(self, layer: nn.Module, x: Tensor) -> Tensor:
        norm, known, add = self._norms.get(layer), _layer(layer), self._added.pop(layer, None)
        if x.numel() != x.shape[-1] or known is None:
            given = x if norm is None else type(norm).forward(norm, x)
            y: Tensor = type(layer).forward(layer, given)
            return y if add is None else y + add
        return row_product(x, known, norm=None if norm is None else gain_of(norm), add=add)

    def _sharded(self, layer: Linear, given: Tensor) -> Tensor:
        """Compute a layer that is split over ranks by one local product, followed by its sum over ranks if it has one."""
        known, norm = sharded_layer(layer), self._norms.get(layer)
        if given.numel() != given.shape[-1] or known is None:
            return type(layer).forward(layer, given if norm is None else type(norm).forward(norm, given))
        y = row_product(layer.input_adapter(given)[0], known, norm=None if norm is None else gain_of(norm))
        axes = layer.plan.sums("y")
        if axes:
            y = all_reduce(y, layer.mesh.group(*axes))
        if layer.bias is not None:
            y = y + layer.bias.to(y.dtype)
        return layer.whole(y) if layer.gather_output else y

    def _gated_mlp(self, mlp: nn.Module, names: tuple[str, ...], x: Tensor) -> Tensor:
        gate, down = getattr(mlp, names[0]), getattr(mlp, names[2])
        call = self._gate_call(mlp) if x.numel() == x.shape[-1] else None
        if call is None:
            return type(mlp).forward(mlp, x)  # type: ignore[no-any-return]
        if isinstance(gate, Linear):
            x = gate.input_adapter(x)[0]
        hidden = row_product(x, call.layer, gate=call.gate, norm=call.norm)
        y: Tensor = down(hidden)
        return y

    def _gate_call(self, mlp: nn.Module) -> RowCall | None:
        """Return the product of an MLP's first layers; None if they cannot be multiplied now."""
        gate, up = (getattr(mlp, name) for name in self._gated[mlp][:2])
        first, second = _factor(gate), _factor(up)
        if first is None or second is None:
            return None
        if gate is up:
            half = first.weight.shape[0] // 2
            first, second = first.part(0, half), second.part(half, 2 * half)
        norm = self._norms.get(gate)
        return RowCall(second, first, None if norm is None else gain_of(norm))


def own_block(added: dict[nn.Module, Tensor], block: Any, x: Tensor, *others: Any) -> Tensor:
    """Compute a block of ours whose last layers add the stream: x + attn(norm1(x)), then x + mlp(norm2(x)).

    Args:
        added: takes the stream of each of them.
        block: in eval mode.
        x, others: of its forward.
    """
    added[block.attn.out] = x
    x = block.attn(block.norm1(x), *others)
    added[block.mlp.down] = x
    y: Tensor = block.mlp(block.norm2(x))
    return y


class _Tables:
    """Cosines and sines of the positions of a few tokens, with the frequencies made once."""

    def __init__(self, rotary: Any) -> None:
        """Args:
        rotary: of our models.
        """
        self._rotary, self._frequencies = rotary, torch.empty(0)

    def __call__(self, positions: Tensor | None, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return what the module's own forward does."""
        if positions is None:
            found: tuple[Tensor, Tensor] = type(self._rotary).forward(self._rotary, positions, seq_len, device)
            return found
        if self._frequencies.device != device or not self._frequencies.numel():
            exponents = torch.arange(0, self._rotary.head_dim, 2, dtype=torch.float32, device=device)
            frequencies = self._rotary.theta ** -(exponents / self._rotary.head_dim)
            self._frequencies = torch.cat((frequencies, frequencies))
        angles = positions.unsqueeze(-1) * self._frequencies
        return angles.cos(), angles.sin()


def _is_own_rotary(module: nn.Module) -> bool:
    """Return True for the tables of our models."""
    own = type(module).__module__.startswith("meshfold.models.")
    return own and isinstance(getattr(module, "theta", None), float | int) and hasattr(module, "head_dim")


def is_own_block(block: nn.Module) -> bool:
    """Return True for a block of ours, with attention and an MLP behind norms."""
    own = type(block).__module__.startswith("meshfold.models.")
    return own and all(submodule(block, path) is not None for path in ENDS)


def as_given(x: Tensor, *others: Any) -> Tensor:
    """Stand in for the forward of a norm that the layers which read it compute."""
    return x


def submodule(block: nn.Module, path: str) -> nn.Module | None:
    """Return the module at a path below another; None if there is none."""
    found: Any = block
    for name in path.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, nn.Module) else None


def _layer(module: object) -> RowWeight | None:
    """Return the operands of a plain linear layer, packed or not; None for any other module."""
    if not isinstance(module, nn.Linear) or module._forward_hooks:
        return None
    packed = packed_weight_of(module)
    if packed is not None:
        plain = packed.columns is None and packed.fits_rows
        return RowWeight(packed.codes, module.bias, packed.scale, packed.zero) if plain else None
    weight = module._parameters.get("weight")
    if type(module).forward is not nn.Linear.forward or weight is None or not weight.is_contiguous():
        return None
    return RowWeight(weight, module.bias)


def sharded_layer(layer: Linear) -> RowWeight | None:
    """Return the operands of a layer that is split over ranks and gathers neither input nor weight; None for any other."""
    plan = layer.plan
    if layer.stored != "nk" or layer.exchange is not None or any(plan.extras(operand) for operand in ("x", "w", "y")):
        return None
    packed, weight = packed_weight_of(layer), layer._parameters.get("weight")
    if packed is not None:
        fits = packed.columns is None and packed.fits_rows
        return RowWeight(packed.codes, None, packed.scale, packed.zero) if fits else None
    return None if weight is None or not weight.is_contiguous() else RowWeight(weight)


def _operands(module: nn.Module) -> RowWeight | None:
    """Return the operands of a layer, split over ranks or not, that the kernels take; None for any other."""
    return sharded_layer(module) if isinstance(module, Linear) else _layer(module)


def _is_plain(layer: nn.Module) -> bool:
    """Return True for a layer that the kernels take, and that is not split over ranks."""
    return _layer(layer) is not None


def _reads_rows(layer: nn.Module) -> bool:
    """Return True for a layer that the kernels take, and that reads whole rows on this rank."""
    whole = not isinstance(layer, Linear) or not layer.plan.sums("y")
    return whole and _operands(layer) is not None


def _factor(module: object) -> RowWeight | None:
    """Return the operands of a plain layer, or of one that is split over its outputs alone; None for any other."""
    if not isinstance(module, Linear):
        return _layer(module)
    alone = module.bias is None and not module.makes_logits and not module.plan.sums("y")
    return sharded_layer(module) if alone else None


def _multiplies(mlp: nn.Module, names: tuple[str, ...]) -> bool:
    """Return True for an MLP with layers of these names, gate, up and down, whose products the kernels compute."""
    gate, up, down = (getattr(mlp, name, None) for name in names)
    last = sharded_layer(down) if isinstance(down, Linear) else _layer(down)
    return last is not None and _factor(gate) is not None and _factor(up) is not None


def gain_of(norm: nn.Module) -> tuple[Tensor, float] | None:
    """Return gain and epsilon of a norm that may be an RMSNorm; None for any other."""
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    bias = getattr(norm, "bias", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(eps, float) or bias is not None:
        return None
    return weight, eps


def _gates_by_silu(mlp: nn.Module) -> bool:
    """Return True for an MLP of ours, which has no other activation, or one whose ``act_fn`` is SiLU."""
    act = getattr(mlp, "act_fn", None)
    if act is None:
        return hasattr(mlp, "gate_up")
    x = torch.linspace(-4, 4, 9)
    try:
        return torch.allclose(act(x), nn.functional.silu(x), atol=1e-6)
    except Exception:  # what it is nobody knows
        return False
