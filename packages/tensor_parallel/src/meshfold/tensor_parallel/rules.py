"""Which part a submodule plays: rules on names and shapes, no file per model.

A linear layer's name decides where it is one of the field's usual names; the shape decides otherwise, or refuses.
What the rules cannot tell the user can: ``parallelize(..., rules={"*.router": "replicate"})``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from meshfold.mesh import LayoutError
from meshfold.mesh.errors import nearest

ROLES = ("column", "row", "head", "stem", "embedding", "positions", "norm", "dropout", "loss", "replicate", "patch")
"""What a user's rule may say."""

_QUERY = r"q_proj|query|wq|to_q|q_lin"
_KEY_VALUE = r"k_proj|v_proj|key|value|wk|wv|to_k|to_v|k_lin|v_lin"
_FUSED_QKV = r"qkv|qkv_proj|c_attn|Wqkv|in_proj|query_key_value"
_COLUMN_MLP = r"up_proj|gate_proj|gate_up_proj|gate_up|up|gate|fc1|c_fc|w1|w3|wi|wi_0|wi_1|dense_h_to_4h|lin1|linear1|fc_in"
_ROW = r"o_proj|out_proj|c_proj|out|wo|to_out|out_lin|down_proj|down|fc2|w2|dense_4h_to_h|lin2|linear2|fc_out"
_HEAD = r"lm_head|head|embed_out|output_projection|classifier|score"
_POSITIONS = r"(.*_)?(positions?|pos|position_embeddings|embed_positions|wpe|pos_emb(ed(ding)?)?)"

QUERY, KEY_VALUE, FUSED_QKV = re.compile(_QUERY), re.compile(_KEY_VALUE), re.compile(_FUSED_QKV)
_COLUMN = re.compile("|".join((_QUERY, _KEY_VALUE, _FUSED_QKV, _COLUMN_MLP)))
_ROW_NAMES, _HEAD_NAMES, _POSITION_NAMES = re.compile(_ROW), re.compile(_HEAD), re.compile(_POSITIONS)


@dataclass
class Roles:
    """The verdict on a model.

    Attributes:
        hidden: size of the residual stream, in elements.
        role: full name of each module that takes part, to its role.
        refused: full name to the reason, for each module with parameters that no rule can place.
    """

    hidden: int
    role: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def named(self, role: str) -> list[str]:
        """The modules of a role, in order."""
        return [name for name, found in self.role.items() if found == role]


def classify(model: nn.Module, rules: Mapping[str, str]) -> Roles:
    """Find each submodule's role.

    Raises:
        LayoutError: for a rule that says an unknown role or matches nothing.
    """
    names = [name for name, _ in model.named_modules()]
    for pattern, role in rules.items():
        if role not in ROLES:
            raise LayoutError(f"rule {pattern!r}: {role!r} is not a role.{nearest(role, ROLES)} Roles are {', '.join(ROLES)}")
        if not any(fnmatchcase(name, pattern) for name in names):
            raise LayoutError(f"rule {pattern!r} matches no submodule.{nearest(pattern, names)}")
    found = Roles(hidden=_hidden_size(model))
    for name, module in model.named_modules():
        if _inside(name, found):
            continue
        said = next((role for pattern, role in rules.items() if fnmatchcase(name, pattern)), None)
        role = said or _role(name, module, model, found.hidden)
        if role:
            found.role[name] = role
        elif any(True for _ in module.parameters(recurse=False)):
            found.refused[name] = _why_not(module)
    return found


def is_linear(module: nn.Module) -> bool:
    """nn.Linear, or transformers' Conv1D, which is one with its weight transposed."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """transformers' Conv1D: weight ``k n``."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def features(module: nn.Module) -> tuple[int, int]:
    """(in, out) of a linear layer."""
    a, b = module.weight.shape
    return (a, b) if is_conv1d(module) else (b, a)


def norm_kind(module: nn.Module) -> str:
    """``"layer"``, ``"rms"`` or nothing."""
    if isinstance(module, nn.LayerNorm):
        return "layer"
    weight = getattr(module, "weight", None)
    if type(module).__name__.endswith("RMSNorm") and weight is not None and weight.dim() == 1:
        return "rms"
    return ""


def norm_eps(module: nn.Module) -> float:
    """The epsilon of a norm, whatever it is called; nn.RMSNorm's None is its dtype's."""
    for name in ("eps", "variance_epsilon", "epsilon"):
        value = getattr(module, name, None)
        if value is not None:
            return float(value)
    import torch

    weight: Any = module.weight
    return torch.finfo(weight.dtype).eps


def _role(name: str, module: nn.Module, model: nn.Module, hidden: int) -> str:
    leaf = name.rsplit(".", 1)[-1]
    if isinstance(module, nn.Embedding):
        return "positions" if _POSITION_NAMES.fullmatch(leaf) else "embedding" if module.embedding_dim == hidden else ""
    if norm_kind(module):
        size = module.weight.shape[-1] if module.weight is not None else module.normalized_shape[-1]
        return "norm" if size == hidden else ""
    if is_linear(module):
        return _linear_role(name, leaf, module, model, hidden)
    if type(module) is nn.Dropout:
        return "dropout"
    if getattr(module, "causal_lm_loss", False):
        return "loss"
    if isinstance(module, nn.Conv2d) and module.kernel_size == module.stride and module.groups == 1:
        return "patch" if module.out_channels == hidden else ""
    return ""


def _linear_role(name: str, leaf: str, module: nn.Module, model: nn.Module, hidden: int) -> str:
    reads, writes = features(module)
    if _HEAD_NAMES.fullmatch(leaf) and reads == hidden:
        return "head"
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
    parent = name.rsplit(".", 2)[-2] if "." in name else ""
    return "row" if reads == writes == hidden and parent in ("output", "self_output") else ""


def _hidden_size(model: nn.Module) -> int:
    """The size of the residual stream: the token table's, else the norms', else what the first linear layer reads."""
    tables = [m for n, m in model.named_modules() if isinstance(m, nn.Embedding)]
    norms = [m for m in model.modules() if norm_kind(m)]
    linears = [m for m in model.modules() if is_linear(m)]
    if norms:
        sizes = [(m.weight.shape[-1] if m.weight is not None else m.normalized_shape[-1]) for m in norms]
        return int(max(set(sizes), key=sizes.count)) if not tables else int(max(sizes))
    if tables:
        return int(max(tables, key=lambda table: table.num_embeddings).embedding_dim)
    return features(linears[0])[0] if linears else 0


def _inside(name: str, found: Roles) -> bool:
    """Whether a module lies inside one that was placed as a whole."""
    return any(name.startswith(f"{placed}.") for placed, role in found.role.items() if role in ("replicate", "loss"))


def _why_not(module: nn.Module) -> str:
    if isinstance(module, nn.MultiheadAttention):
        return "nn.MultiheadAttention hides its projections: write attention with nn.Linear layers q_proj, k_proj, v_proj, out_proj"
    kind = type(module).__name__
    if is_linear(module):
        reads, writes = features(module)
        return f"{kind}({reads}, {writes}): neither its name nor its shape says what it reads and writes"
    return f"{kind}: no rule for this kind of module"
