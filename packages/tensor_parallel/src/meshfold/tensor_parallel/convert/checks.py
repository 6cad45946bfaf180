"""Checks of an analysed model: whatever cannot be split is refused before anything is changed."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from meshfold.mesh import LayoutError
from meshfold.tensor_parallel.convert.analysis import Analysis
from meshfold.tensor_parallel.convert.attention_check import AttentionTrial
from meshfold.tensor_parallel.convert.denoisers import check_mode
from meshfold.tensor_parallel.convert.forward_code import parameters_of
from meshfold.tensor_parallel.convert.head_biases import biases_of
from meshfold.tensor_parallel.convert.heads import Heads
from meshfold.tensor_parallel.convert.roles import (
    ROLES,
    is_head_norm,
    offered_rules,
    rule_of_whole_modules,
    usual_role,
)
from meshfold.tensor_parallel.layers.attention import why_keep_forward
from meshfold.tensor_parallel.module_kinds import (
    check_norm,
    check_norms_by_head,
    features,
    is_linear,
    norm_kind,
    norm_size,
    norms_by_head,
)


def check_analysis(analysis: Analysis) -> None:
    """Raise a LayoutError for what cannot be placed, and for heads and norms that cannot be split."""
    check_mode(analysis.model, analysis.mesh, analysis.mode)
    if analysis.roles.refused:
        listed = "\n".join(f"  {name or '(root)'}: {why}" for name, why in analysis.roles.refused.items())
        raise LayoutError(
            f"cannot place {len(analysis.roles.refused)} submodule(s):\n{listed}\nSay what they are with "
            f"{_offer(analysis)}; role 'replicate' keeps a submodule whole on every rank. Roles are {', '.join(ROLES)}"
        )
    if not analysis.roles.role:
        raise LayoutError(
            f"nothing to split in {type(analysis.model).__name__}: it has no layer that a tensor-parallel mode can split"
        )
    if analysis.roles.role.get("", "replicate") != "replicate":
        raise LayoutError(
            f"{type(analysis.model).__name__}, the module to parallelize, is itself a single layer (role "
            f"{analysis.roles.role['']!r}): put it in a module of its own (nn.Sequential(layer)), or make "
            "meshfold.tensor_parallel.Linear and its like directly"
        )
    for name, heads in analysis.heads.items():
        _check_projections(analysis, name, heads)
    _check_rules_fit(analysis)
    for name, heads in analysis.heads.items():
        heads.check(name, analysis.mesh, analysis.mode)
        _check_region(analysis, name)
    _check_by_tokens(analysis)
    for name in analysis.roles.named("head_norm"):
        _check_head_norm(analysis, name)
    for name in (*analysis.roles.named("norm"), *analysis.roles.named("head_norm")):
        check = check_norms_by_head if norms_by_head(analysis.modules[name]) else check_norm
        with torch.device("cpu"):  # the caller may have chosen the meta device
            check(name, analysis.modules[name])
    for name in analysis.roles.named("replicate"):
        _check_whole(analysis, name)
        _check_joined(analysis, name)
    _check_torchs_attention(analysis)
    _check_shared_by_blocks(analysis)
    for name, heads in analysis.heads.items():
        _check_code(analysis, name, heads)
    _check_two_streams(analysis)


def _offer(analysis: Analysis) -> str:
    """Return rules for the refused modules, ready to paste if they are known to work; otherwise their form."""
    offers = (
        (offered_rules(analysis.model, analysis.roles), "if a row layer reads what the column layer before it writes"),
        (rule_of_whole_modules(analysis.roles), "which keeps that module of every block whole"),
    )
    for rules, note in offers:
        if not rules:
            continue
        try:
            check_analysis(Analysis(analysis.model, analysis.mesh, analysis.mode, {**analysis.rules, **rules}))
        except LayoutError:
            continue
        written = ", ".join(f'"{pattern}": "{role}"' for pattern, role in rules.items())
        return f"rules={{{written}}}, {note}"
    return "rules={'name or pattern': role}"


def _check_rules_fit(analysis: Analysis) -> None:
    """Raise a LayoutError for a linear layer whose rule does not fit its neighbours: a row layer must read the output of a column
    layer.
    """
    for name in analysis.roles.by_rule:
        if not is_linear(analysis.modules[name]):
            continue
        role, parent = analysis.roles.role[name], name.rpartition(".")[0]
        reads, writes = features(analysis.modules[name])
        columns = [other for other in analysis.children(parent, "column") if other != name]
        rows = [other for other in analysis.children(parent, "row") if other != name]
        wide = {features(analysis.modules[other])[1] for other in columns}
        narrow = {features(analysis.modules[other])[0] for other in rows}
        hidden = analysis.roles.hidden
        if role == "row":
            columns = _columns_before(analysis, name)
            wrong = reads not in _row_widths(analysis, columns, narrow)
        elif role in ("column", "replicate") and reads in wide and writes == hidden != reads:
            wrong = True  # it reads split features and writes the residual stream: a row layer
        else:
            wrong = role == "replicate" and reads == hidden and writes in wide & narrow
        if wrong:
            beside = ", ".join(columns) or "none"
            raise LayoutError(
                f"{name}: Linear({reads}, {writes}) cannot be {role!r} by itself: a row layer reads what column layers "
                f"beside it write (here: {beside}). They go together: what reads the residual stream is 'column', what "
                f"writes it is 'row'; or keep all of it whole: {_everywhere(parent)}: 'replicate'"
            )


def _row_widths(analysis: Analysis, columns: list[str], taken: set[int]) -> set[int]:
    """Return the widths that a row layer may read after column layers; ``taken`` are read by other row layers."""
    wide = {features(analysis.modules[column])[1] for column in columns}
    halves = {width // 2 for width in wide - taken}  # fused gate and up
    mine = set(columns)
    return wide | halves | {h.heads * h.head_dim for h in analysis.heads.values() if mine & set(h.projections)}


def _columns_before(analysis: Analysis, name: str) -> list[str]:
    """Return the column layers, in the nearest enclosing module, whose output no other row layer reads."""
    around, inner = name.rpartition(".")[0], True
    while True:
        columns = [
            column
            for column in analysis.roles.named("column")
            if (not around or column.startswith(f"{around}."))
            and (inner or not analysis.children(column.rpartition(".")[0], "row"))
        ]
        if columns or not around:
            return columns
        around, inner = around.rpartition(".")[0], False


def _check_torchs_attention(analysis: Analysis) -> None:
    """Raise a LayoutError for attention with dropout under torch's own forward, where each rank would drop different weights."""
    for name, module in analysis.modules.items():
        if isinstance(module, nn.MultiheadAttention) and module.dropout > 0 and (why := why_keep_forward(module)):
            raise LayoutError(
                f"{name}: {type(module).__name__} with dropout={module.dropout} would drop different weights on each rank, because "
                f"torch's own forward runs ({why}): set its dropout to 0"
            )


def _check_two_streams(analysis: Analysis) -> None:
    """Raise a LayoutError for an encoder-decoder whose attention gets a stand-in for its input: it has one input alone."""
    if not getattr(getattr(analysis.model, "config", None), "is_encoder_decoder", False):
        return
    if any(analysis.mode_at(name).attention for name in analysis.heads):
        raise LayoutError(
            f"{type(analysis.model).__name__} is an encoder-decoder, which mode {analysis.mode.name!r} cannot split: attention by "
            "tokens exchanges those of one stream, and its decoder reads two. Leave attention='tokens' out of tensor"
        )
    for name in analysis.stand_ins:
        raise LayoutError(
            f"{name}: {type(analysis.modules[name]).__name__} takes its width from its input, and in mode "
            f"{analysis.mode.name!r} the attention of an encoder-decoder gets two inputs: write -1 for the width, as in "
            "y.reshape(b, t, -1), or use mode '1d', '2d' or '2.5d'"
        )


def _check_shared_by_blocks(analysis: Analysis) -> None:
    """Raise a LayoutError for a layer used inside and outside the blocks: it would get both split and whole tokens."""
    if not analysis.only_blocks:
        return
    members = {member for blocks in analysis.lists for member in blocks.members.values()}
    inside = {module for member in members for module in member.modules()}
    outside, found = {analysis.model}, [analysis.model]
    while found:
        found = [m for module in found for m in module.children() if m not in members and m not in outside]
        outside.update(found)
    for name, module in analysis.modules.items():
        if module in inside & outside and next(module.parameters(recurse=False), None) is not None:
            raise LayoutError(
                f"{name}, one {type(module).__name__}, is used inside blocks, where mode {analysis.mode.name!r} splits "
                f"tokens, and outside them: make two of it, or use mode '1d'"
            )


def _check_projections(analysis: Analysis, name: str, heads: Heads) -> None:
    """Raise a LayoutError unless all projections of an attention are split, or none."""
    other = [p for p in heads.projections if analysis.roles.role.get(p) != "column"]
    prefix = f"{name}." if name else ""
    other += [
        said
        for said in analysis.roles.by_rule
        if said.rpartition(".")[0] == prefix[:-1]
        and said not in heads.projections
        and analysis.roles.role[said] == "column"
        and usual_role(said, analysis.modules[said], analysis.model, analysis.roles.hidden) == "row"
    ]
    if other:
        listed = ", ".join(f"{p} is {analysis.roles.role.get(p)!r}" for p in other)
        raise LayoutError(
            f"{name or '(root)'}: {listed}, but the projections {', '.join(heads.projections)} go together: all of them "
            f"are 'column' and the layer that writes the output is 'row', so that a rank has whole heads; or keep all of "
            f"the attention whole: {_everywhere(name)}: 'replicate'"
        )


def _check_code(analysis: Analysis, name: str, heads: Heads) -> None:
    """Raise a LayoutError unless the attention's code works with the heads of one rank."""
    biases = tuple(n for n in analysis.roles.named("head_bias") if n.rpartition(".")[0] == name)
    split = bool(analysis.roles.named("head_bias"))
    module, local = (
        analysis.modules[name],
        heads.heads // analysis.mode.head_divisor(analysis.mesh) * heads.head_dim,
    )
    norms = tuple(analysis.children(name, "head_norm"))
    trial = partial(AttentionTrial, name, module, heads, analysis.mesh, analysis.mode, biases, split, norms)
    if why := trial(_input_width(analysis, name)).why_not():
        if _only_attention(analysis, name) and not analysis.adapted and not trial(local, stand_in=True).why_not():
            analysis.stand_ins[name] = local
            return
        where = (
            ""
            if not _splits_rows(analysis) or not biases_of(analysis.modules[name])
            else ", in mode '1d' or '1d+sequence', where that is made for all rows"
        )
        where = (
            ", in mode '1d'"
            if _splits_stream(analysis) and "residual" in parameters_of(analysis.modules[name])
            else where
        )
        raise LayoutError(
            f"{name or '(root)'}: attention that cannot be split by heads: {why}. Keep all of it whole on every rank "
            f"with the rule {_everywhere(name)}: 'replicate'{where}; MLPs and tables are split all the same"
        )


def _input_width(analysis: Analysis, name: str) -> int:
    """Return the last dim of attention's input: the stream's local columns, times the ranks that a region folds."""
    width = analysis.roles.hidden // analysis.mesh.size(*analysis.mode_at(name).layout("residual")["h"])
    plan = analysis.mode.plans["column"]
    folds = analysis.mesh.size(*(axis for dim, axis in plan.extras("y") if dim == plan.m))
    return width * folds if analysis.needs_region(name) else width


def _splits_rows(analysis: Analysis) -> bool:
    """Return True if ranks have different rows of the batch, masks included."""
    return analysis.by_sequences and analysis.mesh.size(*analysis.mode.layout("residual")["m"]) > 1


def _splits_stream(analysis: Analysis) -> bool:
    return analysis.mesh.size(*analysis.mode.layout("residual")["m"], *analysis.mode.layout("residual")["h"]) > 1


def _check_joined(analysis: Analysis, name: str) -> None:
    """Raise a LayoutError for a whole module if an argument after the first comes from the stream or has a rank's rows: only
    the first is gathered.
    """
    module = analysis.modules[name]
    wrong = ["residual"] if _splits_stream(analysis) and "residual" in parameters_of(module) else []
    wrong += biases_of(module) if _splits_rows(analysis) else []
    if wrong:
        modes = "mode '1d'" if "residual" in parameters_of(module) else "mode '1d' or '1d+sequence'"
        raise LayoutError(
            f"{name}: {type(module).__name__} cannot stay whole in mode {analysis.mode.name!r}: it takes "
            f"{', '.join(wrong)} as well, and only a module's first argument is joined; use {modes}"
        )


def _check_region(analysis: Analysis, name: str) -> None:
    """Raise a LayoutError for attention with other layers in its module, if its input is gathered before it."""
    if analysis.needs_region(name) and not _only_attention(analysis, name):
        raise LayoutError(
            f"{name or '(root)'}: in mode {analysis.mode.name!r} attention has other tokens than the residual stream, so its "
            f"input is gathered for the module of its projections; let a module of their own hold "
            f"{', '.join(analysis.heads[name].projections)} and the layer that writes the output, without norms or MLP"
        )


def _check_head_norm(analysis: Analysis, name: str) -> None:
    """Raise a LayoutError for a norm of queries or keys that normalises neither each head separately nor all of them together."""
    attention = name.rpartition(".")[0]
    if attention not in analysis.heads:
        raise LayoutError(
            f"{name}: a norm of heads must be a child of the module that holds the attention's projections; give it the "
            f"rule 'norm' if it normalises the residual stream"
        )
    heads, module = analysis.heads[attention], analysis.modules[name]
    if leaf := norms_by_head(module):
        norms: Any = module.get_submodule(leaf)
        if heads.counted(len(norms), analysis.mesh, analysis.mode) is None or norm_size(norms[0]) != heads.head_dim:
            raise LayoutError(
                f"{name}: has {len(norms)} norms of {norm_size(norms[0])} elements, and attention {heads.heads} heads and "
                f"{heads.kv_heads} key heads of {heads.head_dim}: let there be one for each head, or keep all of the attention "
                f"whole: {attention!r}: 'replicate'"
            )
        return
    size = norm_size(module)
    if size != heads.head_dim and heads.normalised(size, analysis.mesh, analysis.mode) is None:
        raise LayoutError(
            f"{name}: normalises {size} elements together, neither a head of {heads.head_dim} nor all {heads.heads} or "
            f"{heads.kv_heads} of them: let it normalise each head by itself, or keep all of the attention whole: "
            f"{attention!r}: 'replicate'"
        )


def _check_whole(analysis: Analysis, name: str) -> None:
    """Raise a LayoutError for a trained module that gets only one rank's heads: ranks would compute different gradients."""
    module, size = analysis.modules[name], analysis.roles.hidden
    attention = next((heads for heads in analysis.heads if name.startswith(f"{heads}." if heads else "")), None)
    if attention is None or not any(p.requires_grad for p in module.parameters()):
        return
    if norm_kind(module):
        on_heads, role = is_head_norm(name) or norm_size(module) != size, "'head_norm'"
    elif is_linear(module):
        writes_output = usual_role(name, module, analysis.model, size) == "row"
        on_heads, role = writes_output or features(module)[0] != size, "'row'"
    else:  # if the module also has norms or an MLP, this may read the stream
        on_heads, role = _only_attention(analysis, attention), "none"
    if on_heads:
        raise LayoutError(
            f"{name} cannot stay whole inside attention whose heads are split: each rank would train it on its own "
            f"heads. Its role there is {role}; or keep all of the attention whole: "
            f"{attention!r}: 'replicate'"
        )


def _check_by_tokens(analysis: Analysis) -> None:
    """Raise a LayoutError for attention whose linear layers cannot be computed by tokens, if the mode asks for that."""
    mode = analysis.mode
    if not mode.attention:
        return
    where = f"mode {mode.name!r} computes attention's linear layers by tokens (attention='tokens')"
    if own := analysis.roles.named("attention"):
        raise LayoutError(
            f"{own[0]}: {where}, and nn.MultiheadAttention has no linear layers that could be: use mode '1d', in a spec "
            f"without attention='tokens'"
        )
    if not analysis.heads:
        raise LayoutError(
            f"{where}, and no attention with linear layers was found in {type(analysis.model).__name__}: use mode "
            "'1d+sequence', in a spec sequence=dict(mode='megatron') in place of attention='tokens'"
        )
    for name, heads in analysis.heads.items():
        if not _only_attention(analysis, name):
            raise LayoutError(
                f"{name or '(root)'}: {where}, with an exchange behind its projections and in front of the layer that writes "
                f"its output: let a module of their own hold {', '.join(heads.projections)} and that layer, without norms or MLP"
            )


def _only_attention(analysis: Analysis, name: str) -> bool:
    """Return True if a module has only the layers of its attention: no norm of the stream, no MLP, no table."""
    before = any(analysis.children(name, role) for role in ("norm", "embedding", "patch", "stem"))
    alike = set(analysis.children(name, "column")) == set(analysis.heads[name].projections)
    return alike and not before and len(analysis.children(name, "row")) == 1


def _everywhere(name: str) -> str:
    """Return a quoted pattern that matches this module in all blocks."""
    return repr(f"*.{name.rpartition('.')[2]}" if "." in name else name)
