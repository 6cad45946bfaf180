"""The blocks of experts of any model, found by names, shapes and a trial."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from meshfold.experts.feed_forward import ExpertLayout
from meshfold.experts.layer import Experts
from meshfold.experts.trial import layout_of


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertBlock:
    """A router and stacked experts in a model.

    Attributes:
        name: of the block in the model; "" for the model itself.
        block: the module that holds router, experts and shared experts.
        experts_name: of the module of stacked experts in the model.
        experts: that module; called with (tokens [n, h], expert numbers [n, k], weights [n, k]).
        layout: of its parameters.
        stacked: qualified names of the stacked parameters, whose dim 0 is experts.
        router_name: of the router's module in the model; None if no router was recognised.
        router: qualified names of the router's parameters.
        shared: qualified names of the block's other parameters: shared experts and their gates.
        num_experts: how many there are.
        hidden: size of a token.
        ffn: inner size of an expert.
    """

    name: str
    block: nn.Module
    experts_name: str
    experts: nn.Module
    layout: ExpertLayout
    stacked: tuple[str, ...]
    router_name: str | None
    router: tuple[str, ...]
    shared: tuple[str, ...]
    num_experts: int
    hidden: int
    ffn: int


def find_experts(model: nn.Module) -> list[ExpertBlock]:
    """Return every block of experts of a model, in the order of its modules.

    This finds :class:`meshfold.experts.MixtureOfExperts` and all blocks whose experts have stacked parameters. In transformers 5
    these are the blocks of Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, DeepSeek-V3 and gpt-oss. Parameters may be on the meta device. A
    block that :func:`meshfold.experts.shard_experts` has changed is left out.
    """
    found = []
    for name, module, parents in _modules(model, ""):
        if "forward" in module.__dict__:
            continue
        layout = module.layout if isinstance(module, Experts) else layout_of(module)
        if layout is not None:
            block_name, block = parents[-1] if parents else (name, module)
            found.append(_block(block_name, block, name, module, layout))
    return found


def _modules(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module, list[tuple[str, nn.Module]]]]:
    """Yield each module once, with its name and the modules that contain it."""
    seen: set[nn.Module] = set()
    waiting: list[tuple[str, nn.Module, list[tuple[str, nn.Module]]]] = [(name, module, [])]
    while waiting:
        name, module, parents = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        yield name, module, parents
        inner = [*parents, (name, module)]
        children = [(f"{name}.{leaf}" if name else leaf, child, inner) for leaf, child in module.named_children()]
        waiting += reversed(children)


def _block(name: str, block: nn.Module, experts_name: str, experts: nn.Module, layout: ExpertLayout) -> ExpertBlock:
    prefix = f"{name}." if name else ""
    inside = f"{experts_name}." if experts_name else ""
    down = experts.get_parameter(layout.down).shape
    number, hidden, ffn = (down[0], down[2], down[1]) if layout.transposed else down
    router = None if block is experts else _router(block, experts, number, hidden)
    rest = (
        [n for n, _ in block.named_parameters() if not f"{prefix}{n}".startswith(inside)]
        if block is not experts
        else []
    )
    routing = [n for n in rest if router is not None and n.startswith(f"{router}.")]
    return ExpertBlock(
        name=name,
        block=block,
        experts_name=experts_name,
        experts=experts,
        layout=layout,
        stacked=tuple(f"{inside}{n}" for n in layout.names),
        router_name=None if router is None else f"{prefix}{router}",
        router=tuple(f"{prefix}{n}" for n in routing),
        shared=tuple(f"{prefix}{n}" for n in rest if n not in routing),
        num_experts=number,
        hidden=hidden,
        ffn=ffn,
    )


def _router(block: nn.Module, experts: nn.Module, number: int, hidden: int) -> str | None:
    """Return the name of the child that gives each expert a logit: its parameters are a matrix [e, h] and at most vectors [e]."""
    for name, child in block.named_children():
        own = [p.shape for p in child.parameters()]
        if child is not experts and (number, hidden) in own and all(s in ((number, hidden), (number,)) for s in own):
            return name
    return None
