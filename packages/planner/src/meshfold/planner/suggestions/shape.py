"""Sizes of a model that decide how it can be split."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import nn

from meshfold.engine.model import find_blocks
from meshfold.experts import find_experts


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model.

    Attributes:
        blocks: number of repeated blocks; 1 if they differ, and the model is taken as one block.
        path: of the list that has them; None if they differ.
        heads: of attention; None if its config does not say.
        key_values: ratio of key and value heads to query heads.
        experts: of a layer; 0 without.
        top_k: experts of a token; 1 if the config does not say.
        expert_elements: elements of a block's experts.
        parameters: of the whole model.
        embedded: parameters of embeddings, which are in a pipeline's first stage.
        head: elements of matrices outside blocks and embeddings, which are in a pipeline's last stage.
        block: elements of a block's matrices.
    """

    blocks: int
    path: str | None
    heads: int | None
    key_values: float
    experts: int
    top_k: int
    expert_elements: int
    parameters: int
    embedded: int
    head: int
    block: int

    @property
    def split_parts(self) -> int:
        """Parts of a block whose products tensor ranks share: attention and an MLP. Experts lie whole on ranks."""
        return 1 if self.experts else 2

    @classmethod
    def of(cls, model: nn.Module) -> Shape:
        """Return the shape of a model; its parameters may be on the meta device."""
        blocks = find_blocks(model)
        lists = {name.rpartition(".")[0] for name in blocks}
        sizes = [Counter(tuple(p.shape) for p in block.parameters()) for block in blocks.values()]
        alike = len(lists) == 1 and len(blocks) > 2 and all(size == sizes[0] for size in sizes)
        path, repeated = lists.pop() if alike else None, len(blocks) if alike else 1
        inside = {parameter for block in blocks.values() for parameter in block.parameters()}
        tables = {p for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
        matrices = [p for p in model.parameters() if p.dim() > 1]
        tied = sum(p.numel() for p in tables) if _is_tied(model) else 0
        mixtures = find_experts(model)
        heads = _named(model, "num_attention_heads", "heads", "n_head")
        shared = _named(model, "num_key_value_heads", "kv_heads")
        return cls(
            blocks=repeated,
            path=path,
            heads=heads,
            key_values=shared / heads if shared and heads else 1.0,
            experts=mixtures[0].num_experts if mixtures else 0,
            top_k=_named(model, "num_experts_per_tok", "top_k") or 1,
            expert_elements=sum(p.numel() for one in mixtures for p in one.experts.parameters()) // repeated,
            parameters=sum(p.numel() for p in model.parameters()),
            embedded=sum(p.numel() for p in tables),
            head=tied + sum(p.numel() for p in matrices if p not in inside and p not in tables),
            block=sum(p.numel() for p in matrices if p in inside) // repeated,
        )


def _is_tied(model: nn.Module) -> bool:
    names: dict[nn.Parameter, int] = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
    return any(names[p] > 1 for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters())


def _named(model: nn.Module, *names: str) -> int | None:
    """Return the first of these entries of a model's config that is a number."""
    config = getattr(model, "config", None)
    found = [getattr(config, name, None) for name in names]
    return next((number for number in found if isinstance(number, int)), None)
