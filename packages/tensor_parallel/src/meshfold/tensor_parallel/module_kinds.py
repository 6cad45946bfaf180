"""Kinds of layers from any library: linear, norm, dropout, and whether each can be split."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshfold.mesh import LayoutError
from meshfold.tensor_parallel.row_code import works_on_elements

_MIX_COLUMNS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LocalResponseNorm, nn.CrossMapLRN2d)


def is_linear(module: nn.Module) -> bool:
    """Return True for nn.Linear, and for transformers' Conv1D, a linear layer with its weight transposed."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """Return True for transformers' Conv1D: weight ``k n``."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def features(module: nn.Module) -> tuple[int, int]:
    """Return (in, out) of a linear layer."""
    weight: Any = module.weight
    a, b = weight.shape
    return (a, b) if is_conv1d(module) else (b, a)


def is_patch(module: nn.Module) -> bool:
    """Return True for a convolution over patches that do not overlap."""
    return isinstance(module, nn.Conv2d) and module.kernel_size == module.stride and module.groups == 1


def norm_kind(module: nn.Module) -> str:
    """Return ``"layer"``, ``"rms"`` or an empty string."""
    if isinstance(module, nn.LayerNorm):
        return "layer"
    if isinstance(module, nn.RMSNorm):
        return "rms"
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1:
        return ""
    kind = type(module).__name__
    # check_norm tests by a trial that a norm computes what its name says. Cohere's LayerNorm is one, T5's an RMSNorm.
    alone = [name for name, _ in module.named_parameters()] == ["weight"] and hasattr(module, "variance_epsilon")
    if kind.endswith("LayerNorm") and alone:
        return "layer" if _centres(module) else "rms"
    return "rms" if kind.endswith("RMSNorm") else ""


_centring: dict[type, bool] = {}


def _centres(module: nn.Module) -> bool:
    """Return True if a norm subtracts the mean: it makes zeros of equal numbers."""
    kind = type(module)
    if kind not in _centring:
        ones = torch.ones(1, *module.weight.shape, dtype=torch.float64, device="cpu")  # type: ignore[misc]
        try:
            y = torch.func.functional_call(module, {"weight": ones[0]}, (ones,))
            _centring[kind] = bool(y.abs().max() < 0.5)
        except Exception:  # check_norm reports what is wrong
            return False
    return _centring[kind]


def norms_by_head(module: nn.Module) -> str:
    """Return the name of the list in a module that is one norm for each head and nothing else (StableLM); empty for any other."""
    children = list(module.named_children())
    if len(children) != 1 or module._parameters or module._buffers or not isinstance(children[0][1], nn.ModuleList):
        return ""
    leaf, norms = children[0][0], list(children[0][1])
    kinds = {(type(norm), norm_kind(norm), norm_size(norm) if norm_kind(norm) else 0) for norm in norms}
    return leaf if len(kinds) == 1 and all(map(norm_kind, norms)) else ""


def norm_size(module: nn.Module) -> int:
    """Return the number of features that a norm normalises; 0 for one over several dims."""
    shape: Any = getattr(module, "normalized_shape", None)
    if shape is None:
        weight: Any = module.weight
        shape = weight.shape
    return int(shape[0]) if len(shape) == 1 else 0


def norm_eps(module: nn.Module) -> float | None:
    """Return the epsilon of a norm, whatever it is called; None for nn.RMSNorm's default, see :func:`eps_for`."""
    for name in ("eps", "variance_epsilon", "epsilon"):
        value = getattr(module, name, None)
        if value is not None:
            return float(value)
    return None if isinstance(module, nn.RMSNorm) else _measured_eps(module)


def norm_offset(module: nn.Module) -> float:
    """Return what a norm adds to its weight: 1 for those that multiply by ``1 + weight`` (Gemma, Nemotron), else 0."""
    weight = getattr(module, "weight", None)
    if type(module) in (nn.LayerNorm, nn.RMSNorm) or weight is None:
        return 0.0
    x = torch.randn(2, norm_size(module), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    zeros = {key: torch.zeros(value.shape, dtype=torch.float64) for key, value in module.named_parameters()}
    try:
        return float(bool(torch.func.functional_call(module, zeros, (x,)).abs().max() > 0.5))
    except Exception:  # check_norm reports what is wrong
        return 0.0


def eps_for(eps: float | None, dtype: torch.dtype) -> float:
    """Return the epsilon with which a norm computes inputs of a dtype; None is torch's own: of the dtype it sums in."""
    if eps is not None:
        return eps
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps


def _measured_eps(module: nn.Module) -> float:
    """Measure the epsilon of a norm without an attribute for it, on an input where it outweighs the squares."""
    generator = torch.Generator().manual_seed(0)
    x = 1e-6 * torch.randn(1, norm_size(module), generator=generator, dtype=torch.float64)
    ones = {
        key: torch.full(value.shape, 0.0 if key == "bias" else 1.0 - norm_offset(module), dtype=torch.float64)
        for key, value in module.named_parameters()
    }
    try:
        y = torch.func.functional_call(module, ones, (x,)).double()
    except Exception:  # check_norm reports what is wrong
        return 0.0
    x = x if norm_kind(module) == "rms" else x - x.mean()
    eps = float((x.square().sum() / y.square().sum()) - x.square().mean())
    return float(f"{eps:.4g}") if 1e-15 < eps < 1.0 else 0.0


def check_norm(name: str, module: nn.Module) -> None:
    """Raise a LayoutError unless a norm with a forward of its own computes what torch's would.

    It is tried on a few numbers, with other weights than its own.
    """
    kind, size = norm_kind(module), norm_size(module)
    if type(module) in (nn.LayerNorm, nn.RMSNorm):
        return
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, size, generator=generator, dtype=torch.float64)
    x[3:] *= 1e-3  # small enough for epsilon to matter
    probe = {
        key: torch.randn(value.shape, generator=generator, dtype=torch.float64) + 1.5
        for key, value in module.named_parameters()
    }
    centred = x if kind == "rms" else x - x.mean(-1, keepdim=True)
    wanted = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps_for(norm_eps(module), x.dtype))
    wanted = wanted * (probe.get("weight", 1.0) + norm_offset(module)) + probe.get("bias", 0.0)
    try:
        found = torch.func.functional_call(module, probe, (x,))
        alike = isinstance(found, Tensor) and torch.allclose(found.double(), wanted, rtol=1e-4, atol=1e-4)
    except Exception:
        alike = False
    if not alike:
        formula = "x / rms(x) * weight" if kind == "rms" else "(x - mean) / std * weight + bias"
        raise LayoutError(
            f"{name}: {type(module).__name__} does not compute the usual {formula}, by which the rule for norms "
            f"would replace it: give it the rule {name!r}: 'replicate'"
        )


def check_norms_by_head(name: str, module: nn.Module) -> None:
    """Raise a LayoutError unless a module gives each norm of its list a head of its own, the second dim of four.

    It is tried on a few numbers, with other weights than its own.
    """
    leaf = norms_by_head(module)
    norms: Any = module.get_submodule(leaf)
    check_norm(f"{name}.{leaf}.0", norms[0])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, len(norms), 3, norm_size(norms[0]), generator=generator, dtype=torch.float64)
    probe = {
        key: torch.randn(value.shape, generator=generator, dtype=torch.float64) + 1.5
        for key, value in module.named_parameters()
    }
    try:
        found = torch.func.functional_call(module, probe, (x,))
        wanted = [
            torch.func.functional_call(
                norm, {key: probe[f"{leaf}.{number}.{key}"] for key, _ in norm.named_parameters()}, (x[:, number],)
            )
            for number, norm in enumerate(norms)
        ]
        alike = torch.allclose(found, torch.stack(wanted, 1))
    except Exception:  # the model's code may raise anything
        alike = False
    if not alike:
        raise LayoutError(
            f"{name}: {type(module).__name__} does not give each of its {len(norms)} norms the head of its number, the second of "
            f"four dims: keep all of the attention whole: {name.rpartition('.')[0]!r}: 'replicate'"
        )


def _multiplies(module: nn.Linear) -> bool:
    """Return True if the forward of a linear layer's class computes ``x wᵀ + b``, written in another way (Falcon).

    It is tried in training mode, on numbers of several magnitudes and weights of another size than its own.
    """
    if module._buffers or set(module._parameters) != {"weight", "bias"}:
        return False
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")

    x, weight = (
        numbers(2, 3, 5) * torch.tensor([1e-3, 1.0, 1e3], dtype=torch.float64, device="cpu")[:, None],
        numbers(7, 5),
    )
    bias = None if module.bias is None else numbers(7)
    twin = copy.copy(module)
    twin._parameters, twin.training = {"weight": nn.Parameter(weight), "bias": bias}, True  # type: ignore[dict-item]
    try:
        found = type(module).forward(twin, x)
        return isinstance(found, Tensor) and torch.allclose(found, functional.linear(x, weight, bias), rtol=1e-9)
    except Exception:  # the model's code may raise anything
        return False


def why_not(module: nn.Module) -> str:
    """Return why a layer of a known kind cannot be replaced by a sharded one; empty if it can, or for other kinds."""
    kind = type(module).__name__
    for base in (nn.Linear, nn.Embedding, nn.Conv2d):
        if isinstance(module, base):
            coded = (isinstance(module, nn.Embedding) and works_on_elements(module)) or (
                isinstance(module, nn.Linear) and _multiplies(module)
            )
            if type(module).forward is not base.forward and not coded:
                return f"{kind} has a forward of its own, which splitting it as {base.__name__} would lose"
            extra = sorted(set(dict(module.named_parameters())) - {"weight", "bias"})
            if extra or not isinstance(module.weight, nn.Parameter):
                return f"{kind} computes its weight from other parameters ({', '.join(extra) or 'none of its own'})"
    if norm_kind(module) and not norm_size(module):
        return f"{kind} normalises over several dims, {tuple(module.normalized_shape)}: only the last can be split"  # type: ignore[arg-type]
    if isinstance(module, _MIX_COLUMNS):
        return f"{kind} has statistics of its own over dims that are split: use LayerNorm or RMSNorm"
    if isinstance(module, nn.modules.dropout._DropoutNd) and type(module) is not nn.Dropout and module.p > 0:
        return f"{kind} is not dropout of single elements: use nn.Dropout, or p=0"
    return ""
