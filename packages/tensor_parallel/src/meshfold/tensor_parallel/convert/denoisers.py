"""Roles in the denoisers of Hugging Face's diffusers (U-Nets, DiT, SD3, Flux): by structure, no file per model.

Attention is split by heads and MLPs by their inner dim. Everything else stays whole on every rank: convolutions, norms with
their modulation (adaLN), embedders of timesteps, classes and text. Blocks of one model may have different widths.

============================================  =============
``to_q to_k to_v``, ``add_q_proj ...``        column
``to_out.0``, ``to_add_out``                  row
norms of queries and keys                     head_norm
``net.0.proj`` and ``net.2`` of an MLP        column, row
``proj_mlp`` beside attention, ``proj_out``   column, row: the row layer reads heads and the MLP's inner dim, concatenated
============================================  =============
"""

from __future__ import annotations

from torch import nn

from meshfold.mesh import LayoutError, Mesh
from meshfold.tensor_parallel.modes import Mode
from meshfold.tensor_parallel.module_kinds import features, is_linear, norm_kind

_QUERY_KEY_VALUE = ("to_q", "to_k", "to_v")
_COLUMNS = (*_QUERY_KEY_VALUE, "add_q_proj", "add_k_proj", "add_v_proj")
_HEAD_NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")


def is_denoiser(module: nn.Module) -> bool:
    """Return True for a model of diffusers."""
    return any(
        kind.__module__ == "diffusers.models.modeling_utils" and kind.__name__ == "ModelMixin"
        for kind in type(module).__mro__
    )


def denoiser_roles(model: nn.Module) -> dict[str, str]:
    """Return the role of each submodule of diffusers' models inside of a model, by full name; empty without one."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        if is_denoiser(module) and not any(_holds(outer, name) for outer in found):
            split = _split_layers(module)
            whole = _whole_modules(module, split)
            found |= {_join(name, leaf): role for leaf, role in {**split, **whole}.items()}
    return found


def check_mode(model: nn.Module, mesh: Mesh, mode: Mode) -> None:
    """Raise a LayoutError for a denoiser in a mode that splits the stream between its layers."""
    residual = mode.layout("residual")
    kind = next((type(m).__name__ for m in model.modules() if is_denoiser(m)), "")
    if kind and mesh.size(*residual.axes) > 1:
        raise LayoutError(
            f"{kind} in mode {mode.name!r}, which splits the stream between layers: its modulation, convolutions and group "
            "norms need whole rows. Use mode '1d', and zero to split what stays whole on every rank"
        )


def _split_layers(model: nn.Module) -> dict[str, str]:
    """Return the roles of what is split: attention and MLPs."""
    roles: dict[str, str] = {}
    for name, module in model.named_modules():
        leaves = dict(module.named_children())
        if all(is_linear(leaves[leaf]) if leaf in leaves else False for leaf in _QUERY_KEY_VALUE):
            roles |= _attention(name, leaves)
        for column, row, widths in _mlps(module, leaves):
            if features(module.get_submodule(row))[0] in widths:
                roles |= {_join(name, column): "column", _join(name, row): "row"}
    return roles


def _attention(name: str, leaves: dict[str, nn.Module]) -> dict[str, str]:
    roles = {_join(name, leaf): "column" for leaf in _COLUMNS if leaf in leaves and is_linear(leaves[leaf])}
    roles |= {_join(name, leaf): "head_norm" for leaf in _HEAD_NORMS if leaf in leaves and _trains(leaves[leaf])}
    if "to_add_out" in leaves and is_linear(leaves["to_add_out"]):
        roles[_join(name, "to_add_out")] = "row"
    out = leaves.get("to_out")
    if out is not None and is_linear(out):
        roles[_join(name, "to_out")] = "row"
    elif isinstance(out, nn.ModuleList | nn.Sequential) and len(out) and is_linear(out[0]):
        roles[_join(name, "to_out.0")] = "row"
    return roles


def _mlps(module: nn.Module, leaves: dict[str, nn.Module]) -> list[tuple[str, str, set[int]]]:
    """Return (column, row, widths that the row layer may read) of the MLPs that a module holds, by their leaves."""
    net = leaves.get("net")
    if isinstance(net, nn.ModuleList) and len(net) > 2:
        first = getattr(net[0], "proj", None)
        if isinstance(first, nn.Module) and is_linear(first) and is_linear(net[2]):
            width = features(first)[1]
            return [("net.0.proj", "net.2", {width, width // 2})]
    attention = leaves.get("attn")
    beside, out = leaves.get("proj_mlp"), leaves.get("proj_out")
    if attention is not None and beside is not None and out is not None and is_linear(beside) and is_linear(out):
        value = getattr(attention, "to_v", None)
        if isinstance(value, nn.Module) and is_linear(value):
            return [("proj_mlp", "proj_out", {features(value)[1] + features(beside)[1]})]
    return []


def _whole_modules(model: nn.Module, split: dict[str, str]) -> dict[str, str]:
    """Return the largest modules with parameters that hold nothing that is split."""
    found: dict[str, str] = {}
    waiting = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if name in split:
            continue
        if any(_holds(name, other) for other in split):
            waiting += reversed([(_join(name, leaf), child) for leaf, child in module.named_children()])
        elif next(module.parameters(), None) is not None:
            found[name] = "replicate"
    return found


def _trains(module: nn.Module) -> bool:
    return bool(norm_kind(module)) and next(module.parameters(), None) is not None


def _join(name: str, leaf: str) -> str:
    return f"{name}.{leaf}" if name and leaf else name or leaf


def _holds(outer: str, name: str) -> bool:
    return not outer or name == outer or name.startswith(f"{outer}.")
