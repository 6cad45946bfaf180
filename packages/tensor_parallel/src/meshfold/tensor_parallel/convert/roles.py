"""Roles of submodules, by rules on names and shapes: no file per model.

A linear layer's name decides where it is one of the field's usual names; the shape decides otherwise, or refuses.
Where the rules cannot decide, the user can: ``parallelize(..., rules={"*.router": "replicate"})``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from meshfold.mesh import LayoutError, did_you_mean, metadata
from meshfold.tensor_parallel.convert.denoisers import denoiser_roles
from meshfold.tensor_parallel.convert.own_tokens import MARK, is_marked
from meshfold.tensor_parallel.layers.experts import experts_of
from meshfold.tensor_parallel.module_kinds import (
    features,
    is_linear,
    is_patch,
    norm_kind,
    norm_size,
    norms_by_head,
    why_not,
)

_QUERY = r"q_proj|query|wq|to_q|q_lin|q|add_q_proj"
_KEY_VALUE = r"k_proj|v_proj|key|value|wk|wv|to_k|to_v|k_lin|v_lin|k|v|add_k_proj|add_v_proj"
_FUSED_QKV = r"qkv|qkv_proj|c_attn|Wqkv|in_proj"
_INTERLEAVED_QKV = r"query_key_value"
_COLUMN_MLP = (
    r"up_proj|gate_proj|gate_up_proj|gate_up|up|gate|fc1|c_fc|w1|w3|wi|wi_0|wi_1|Wi|dense_h_to_4h|lin1|linear1|fc_in"
)
_ROW = r"o|o_proj|out_proj|c_proj|proj|out|wo|Wo|to_out|out_lin|down_proj|down|fc2|w2|dense_4h_to_h|lin2|linear2|fc_out"
_HEAD = r"lm_head|head|embed_out|output_projection|classifier|score"
_POSITIONS = r"(.*_)?(positions?|pos|position_embeddings|embed_positions|wpe|pos_emb(ed(ding)?)?)"
_HEAD_BIAS = r"relative_attention_bias"
_HEAD_NORM = r"(q|k|v|query|key|value)_?(layer)?_?norm|norm_?(added_)?(q|k|v)|(q|k)_ln"

QUERY, KEY_VALUE, FUSED_QKV = re.compile(_QUERY), re.compile(_KEY_VALUE), re.compile(_FUSED_QKV)
INTERLEAVED_QKV = re.compile(_INTERLEAVED_QKV)
_COLUMN = re.compile("|".join((_QUERY, _KEY_VALUE, _FUSED_QKV, _INTERLEAVED_QKV, _COLUMN_MLP)))
_ROW_NAMES, _HEAD_NAMES, _POSITION_NAMES = re.compile(_ROW), re.compile(_HEAD), re.compile(_POSITIONS)
_HEAD_NORM_NAMES, _HEAD_BIAS_NAMES = re.compile(_HEAD_NORM), re.compile(_HEAD_BIAS)
_ROW_PARENTS = ("output", "self_output", "attention", "self_attention", "attn", "self_attn")
"""Where a square layer called ``dense`` (BERT, GPT-NeoX) writes the residual stream."""

_KINDS: dict[str, tuple[str, Callable[[nn.Module], bool]]] = {
    **dict.fromkeys(("column", "row", "head", "stem"), ("a linear layer", is_linear)),
    **dict.fromkeys(
        ("embedding", "positions", "head_bias"), ("an nn.Embedding", lambda m: isinstance(m, nn.Embedding))
    ),
    "norm": ("a LayerNorm or RMSNorm", lambda m: bool(norm_kind(m))),
    "head_norm": (
        "a LayerNorm or RMSNorm, or a list of them in a module of its own",
        lambda m: bool(norm_kind(m) or norms_by_head(m)),
    ),
    "dropout": ("an nn.Dropout", lambda m: isinstance(m, nn.Dropout)),
    "loss": ("any module", lambda m: True),
    "replicate": ("any module", lambda m: True),
    "source": ("any module", lambda m: True),
    "mixture": ("a module round experts whose weights have three dims", lambda m: bool(experts_of(m))),
    "own_tokens": (f"a module that says {MARK} = True", is_marked),
    "patch": ("a convolution with stride = kernel_size", is_patch),
}
ROLES = tuple(_KINDS)
"""What a user's rule may say."""


WHOLE = ("replicate", "source", "mixture", "own_tokens", "attention")
"""The roles of modules that keep all their contents, before a stream that is whole."""


@dataclass
class Roles:
    """Roles of a model's modules.

    Attributes:
        hidden: size of the residual stream, in elements.
        role: full name of each module that takes part, to its role.
        refused: full name to the reason, for each module that no rule can place.
        by_rule: the modules whose role the user gave.
    """

    hidden: int
    role: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    by_rule: list[str] = field(default_factory=list)

    def named(self, role: str) -> list[str]:
        """Return the modules of a role, in order."""
        return [name for name, found in self.role.items() if found == role]


def check_rules(model: nn.Module, rules: Mapping[str, str]) -> None:
    """Check that a user's rules map patterns to roles, and that each matches a module.

    Raises:
        LayoutError: for a rule with an unknown role or without a match, and for anything but a mapping.
    """
    if not isinstance(rules, Mapping):
        raise LayoutError(
            f"rules={rules!r} is a {type(rules).__name__}, not a dict of role by pattern: write "
            f"rules={{'*.router': 'replicate'}}"
        )
    names = [name for name, _ in model.named_modules()]
    for pattern, role in rules.items():
        if role not in ROLES:
            raise LayoutError(
                f"rule {pattern!r}: {role!r} is not a role.{did_you_mean(str(role), ROLES)} Roles are {', '.join(ROLES)}"
            )
        if not any(fnmatchcase(name, pattern) for name in names):
            raise LayoutError(f"rule {pattern!r} matches no submodule.{_instead(pattern, names)}")


def _instead(pattern: str, names: list[str]) -> str:
    """Suggest a pattern: the given one with another last word, or a full name; otherwise list the names' last words."""
    front, dot, _ = str(pattern).rpartition(".")
    leaves = list(dict.fromkeys(leaf for name in names if not (leaf := name.rpartition(".")[2]).isdigit()))
    others = [other for leaf in leaves if any(fnmatchcase(name, other := f"{front}{dot}{leaf}") for name in names)]
    meant = did_you_mean(str(pattern), others) or did_you_mean(str(pattern), names)
    if not any(leaves):  # only numbers, as in nn.Sequential
        return meant or f" Names here are {', '.join(filter(None, names))}"
    return meant or f" Names here end in {', '.join(filter(None, leaves))}"


def classify(model: nn.Module, rules: Mapping[str, str], *, splits_stream: bool = False) -> Roles:
    """Find each submodule's role.

    Args:
        model: to be split.
        rules: a user's.
        splits_stream: ranks have different tokens or columns of the stream: a router with experts that are modules stays whole,
            since its code selects tokens by position.

    Raises:
        LayoutError: for a rule with an unknown role, without a match, or that matches another kind of module.
    """
    check_rules(model, rules)
    denoisers = denoiser_roles(model)
    found = Roles(hidden=_hidden_size(model))
    # A head's bias may have a second name (BERT); it is handled with the layer's.
    shared = {p for m in model.modules() if is_linear(m) for p in m.parameters(recurse=False)}
    for name, module in model.named_modules():
        if _inside(name, found):
            continue
        pattern, said = next(((p, role) for p, role in rules.items() if fnmatchcase(name, p)), ("", ""))
        if said and not _KINDS[said][1](module):
            raise LayoutError(
                f"rule {pattern!r} gives {name!r} the role {said!r}, which is for {_KINDS[said][0]}, "
                f"but it is {type(module).__name__}"
            )
        role = (
            said
            or denoisers.get(name)
            or _routed_role(module, splits_stream)
            or _role(name, module, model, found.hidden)
        )
        # Position tables keep their forward and whole modules keep everything, so nothing needs checking.
        reason = "" if role in (*WHOLE, "loss", "positions") else _refuse(module)
        if role and not reason:
            found.role[name] = role
            found.by_rule += [name] if said else []
        elif reason or any(is_linear(module) or p not in shared for p in module.parameters(recurse=False)):
            found.refused[name] = reason or _no_rule(module, found.hidden)
    return found


def is_head_norm(name: str) -> bool:
    """Return True if a norm, or the module that it is in, is named like one of queries or keys."""
    return any(_HEAD_NORM_NAMES.fullmatch(part) for part in name.split("."))


def _refuse(module: nn.Module) -> str:
    if any(metadata(p) is not None for p in module.parameters(recurse=False)):
        return f"{type(module).__name__} is split already: parallelize the model as it was written"
    return why_not(module)


def _role(name: str, module: nn.Module, model: nn.Module, hidden: int) -> str:
    leaf = name.rsplit(".", 1)[-1]
    if isinstance(module, nn.Embedding):
        return (
            "positions"
            if _POSITION_NAMES.fullmatch(leaf)
            else "head_bias"
            if _HEAD_BIAS_NAMES.fullmatch(leaf)
            else "embedding"
            if module.embedding_dim == hidden
            else ""
        )
    if norm_kind(module):
        return "head_norm" if is_head_norm(name) else "norm" if norm_size(module) == hidden else ""
    if is_head_norm(name) and norms_by_head(module):
        return "head_norm"
    if is_linear(module):
        return _linear_role(name, leaf, module, model, hidden)
    if type(module) is nn.Dropout:
        return "dropout"
    if getattr(module, "causal_lm_loss", False):
        return "loss"
    if isinstance(module, nn.Conv2d) and is_patch(module):
        return "patch" if module.out_channels == hidden else ""
    if is_marked(module):
        return "own_tokens"
    if type(module) is nn.MultiheadAttention:
        return "attention" if module.embed_dim == hidden else ""
    if _is_mixture(module, hidden):
        return "mixture"
    return "source" if _is_source(module, hidden) else ""


def _is_mixture(module: nn.Module, hidden: int) -> bool:
    """Return True for a router with its experts, without attention or norms of the stream."""
    if not experts_of(module):
        return False
    inside = dict(module.named_modules())
    return not any(
        QUERY.fullmatch(name.rpartition(".")[2]) or (norm_kind(m) and norm_size(m) == hidden)
        for name, m in inside.items()
    )


def _routed_role(module: nn.Module, splits_stream: bool) -> str:
    """Return the role of a router with experts that are modules (Switch Transformers); empty for any other module."""
    experts = next((child for leaf, child in module.named_children() if leaf == "experts"), None)
    if not splits_stream or not isinstance(experts, nn.ModuleDict | nn.ModuleList) or len(experts) < 2:
        return ""
    children = list(experts.children())
    alike = len({type(child) for child in children}) == 1 and any(is_linear(m) for m in children[0].modules())
    routers = [m for child in module.children() if child is not experts for m in child.modules() if is_linear(m)]
    return "replicate" if alike and any(features(m)[1] == len(children) for m in routers) else ""


def _is_source(module: nn.Module, hidden: int) -> bool:
    """Return True for a module that makes a stream from images: patches plus its own parameters (ViT)."""
    own = list(module.parameters(recurse=False))
    return (
        bool(own)
        and all(p.shape[-1] == hidden for p in own if p.dim())
        and any(isinstance(m, nn.Conv2d) and is_patch(m) and m.out_channels == hidden for m in module.modules())
        and not any(is_linear(m) or norm_kind(m) for m in module.modules())
    )


def offered_rules(model: nn.Module, roles: Roles) -> dict[str, str]:
    """Return rules for linear layers that neither their name nor their shape places, if they come in pairs within a module.

    The second of a pair reads the output of the first, and is as wide as the stream or the last layer of the model. Empty if
    anything was refused that is in no pair.
    """
    linears = [name for name, module in model.named_modules() if is_linear(module)]
    refused, found = list(roles.refused), dict[str, str]()
    if len(refused) % 2 or any(name not in linears for name in refused):
        return {}
    for first, second in zip(refused[::2], refused[1::2], strict=True):
        (_, between), (reads, writes) = (features(model.get_submodule(name)) for name in (first, second))
        alone = second == linears[-1] and first == linears[0]
        if (
            first.rpartition(".")[0] != second.rpartition(".")[0]
            or between != reads
            or (writes != roles.hidden and not alone)
        ):
            return {}
        found |= {_pattern(first): "column", _pattern(second): "row"}
    return found


def rule_of_whole_modules(roles: Roles) -> dict[str, str]:
    """Return the rule that keeps one module of every block whole, such as its attention, if all that was refused is in it."""
    found = set()
    for name in roles.refused:
        parts = name.split(".")
        number = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts))
        found.add(_pattern(".".join(parts[: number + 2])) if number + 1 < len(parts) else "")
    return {} if len(found) != 1 or "" in found else {found.pop(): "replicate"}


def _pattern(name: str) -> str:
    """Turn a full name into a pattern for every block: numbers before the last word become ``*``."""
    *front, leaf = name.split(".")
    return ".".join([*("*" if part.isdigit() else part for part in front), leaf])


def usual_role(name: str, module: nn.Module, model: nn.Module, hidden: int) -> str:
    """Return the role of a linear layer that no rule of the user names; empty if it cannot be determined."""
    return _linear_role(name, name.rpartition(".")[2], module, model, hidden)


def _linear_role(name: str, leaf: str, module: nn.Module, model: nn.Module, hidden: int) -> str:
    reads, writes = features(module)
    parent = name.rsplit(".", 2)[-2] if "." in name else ""
    if _HEAD_NAMES.fullmatch(leaf) and reads == hidden:
        return "replicate" if parent == "router" else "head"
    if _ROW_NAMES.fullmatch(leaf) and writes == hidden:
        return "row"
    if _COLUMN.fullmatch(leaf) and reads == hidden:
        return "column"
    linears = [(other, *features(m)) for other, m in model.named_modules() if is_linear(m)]
    place = [other for other, _, _ in linears].index(name)
    before, after = linears[:place], linears[place + 1 :]
    if reads == hidden and writes != hidden:
        return "column" if any(r == writes and w == hidden for _, r, w in after) else "head" if not after else ""
    if reads != hidden and writes == hidden:
        return "row" if any(r == hidden and w == reads for _, r, w in before) else "stem" if not before else ""
    if reads == writes == hidden:
        if leaf == "dense" and parent in _ROW_PARENTS:
            return "row"
        # A pooler, or the transform before a head: small, one per model, and not in one of its numbered blocks.
        return "replicate" if _is_numbered(model) and not any(part.isdigit() for part in name.split(".")) else ""
    return ""


def _is_numbered(model: nn.Module) -> bool:
    """Return True if the model has linear layers in numbered blocks."""
    return any(is_linear(m) and any(part.isdigit() for part in name.split(".")) for name, m in model.named_modules())


def _hidden_size(model: nn.Module) -> int:
    """Return the width of the residual stream: of the norms (those of queries and keys last), else of the token table, else of the
    first linear layer's input."""
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    norms = {name: norm_size(m) for name, m in model.named_modules() if norm_kind(m)}
    sizes = [size for name, size in norms.items() if not is_head_norm(name)] or [*norms.values()]
    linears = [m for m in model.modules() if is_linear(m)]
    if sizes:
        return max(set(sizes), key=sizes.count) if not tables else max(sizes)
    if tables:
        return int(max(tables, key=lambda table: table.num_embeddings).embedding_dim)
    return features(linears[0])[0] if linears else 0


def _inside(name: str, found: Roles) -> bool:
    """Return True if a module is inside one that was placed as a whole."""
    whole = [placed for placed, role in found.role.items() if role in (*WHOLE, "loss", "head_norm")]
    return any(not placed or name.startswith(f"{placed}.") for placed in whole)


def _no_rule(module: nn.Module, hidden: int) -> str:
    kind = type(module).__name__
    if isinstance(module, nn.MultiheadAttention):
        if type(module) is nn.MultiheadAttention:
            return f"{kind} is {module.embed_dim} wide, not {hidden} like the residual stream"
        return f"{kind} hides its projections: write attention with nn.Linear layers q_proj, k_proj, v_proj, out_proj"
    if is_linear(module):
        reads, writes = features(module)
        return f"{kind}({reads}, {writes}): neither its name nor its shape says what it reads and writes"
    if isinstance(module, nn.Embedding):
        return f"{kind} is {module.embedding_dim} wide, not {hidden} like the residual stream"
    if norm_kind(module):
        return f"{kind} of size {norm_size(module)} does not normalise the residual stream, which is {hidden} wide"
    own = ", ".join(key for key, _ in module.named_parameters(recurse=False))
    return f"{kind} has parameters of its own ({own}) and there is no rule for it"
