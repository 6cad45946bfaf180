"""Upcycling of a folder: the feed-forwards of a dense model become the experts of a mixture that transformers has, file to file.

Each expert is a copy of its layer's feed-forward, and the weights of a token's experts sum to one. The mixture therefore computes
what the dense model did, until training makes the experts differ. Source: Komatsuzaki et al., "Sparse Upcycling", 2022.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meshfold.checkpoint import CheckpointError
from meshfold.checkpoint.tensors import TensorInfo
from meshfold.huggingface.decoder_names import Step
from meshfold.mesh import SpecError

_DENSE = re.compile(r"^(?P<layer>.*\blayers\.\d+)\.mlp\.(?P<part>gate|up|down)_proj\.(?P<kind>weight|bias)$")


@dataclass(frozen=True, kw_only=True)
class _Family:
    """A mixture of transformers that equals a dense model with its feed-forwards replaced by experts.

    Attributes:
        kind: its ``model_type``.
        architecture: its class.
        block: name of the mixture in a layer's files.
        parts: names of gate, up and down of an expert in its files.
        settings: entries of its ``config.json``, from experts, experts of a token, and the dense model's inner size.
    """

    kind: str
    architecture: str
    block: str
    parts: Mapping[str, str]
    settings: Callable[[int, int, int], dict[str, Any]]


_MIXTRAL = _Family(
    kind="mixtral",
    architecture="MixtralForCausalLM",
    block="block_sparse_moe",
    parts=dict(gate="w1", up="w3", down="w2"),
    settings=lambda experts, top_k, ffn: dict(
        num_local_experts=experts, num_experts_per_tok=top_k, router_jitter_noise=0.0, output_router_logits=False
    ),
)
_QWEN3_MOE = _Family(
    kind="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    block="mlp",
    parts=dict(gate="gate_proj", up="up_proj", down="down_proj"),
    settings=lambda experts, top_k, ffn: dict(
        num_experts=experts,
        num_experts_per_tok=top_k,
        moe_intermediate_size=ffn,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        output_router_logits=False,
    ),
)
FAMILIES = {"llama": _MIXTRAL, "mistral": _MIXTRAL, "qwen3": _QWEN3_MOE}
"""The mixture that each dense family becomes, by ``model_type``."""


def upcycled(
    steps: Sequence[Step], theirs: Mapping[str, Any] | None, experts: int, top_k: int
) -> tuple[list[Step], dict[str, Any]]:
    """Return the steps that write a mixture instead of a dense model, and its ``config.json``.

    Args:
        steps: those that write the files of the dense model.
        theirs: its ``config.json``; None if there is none.
        experts: of each layer.
        top_k: experts a token.

    Raises:
        SpecError: for numbers that do not fit.
        CheckpointError: for a model that no mixture of transformers equals.
    """
    if experts < 2:
        raise SpecError(f"experts={experts}: a mixture has at least 2 experts")
    if not 1 <= top_k <= experts:
        raise SpecError(f"top_k={top_k}: a token goes to 1 to {experts} of {experts} experts")
    family = _family(theirs)
    config = dict(theirs or {})
    found = [match for step in steps for name in step.results if (match := _DENSE.match(name))]
    if any(match["kind"] == "bias" for match in found):
        raise CheckpointError(
            f"its feed-forwards have biases, and experts of {family.kind} have none: it cannot be upcycled"
        )
    layers = list(dict.fromkeys(match["layer"] for match in found))
    if len(found) != 3 * len(layers) or len(layers) != config.get("num_hidden_layers"):
        raise CheckpointError(
            f"{len(found)} weights of gate, up and down in {len(layers)} layers, and config.json says "
            f"num_hidden_layers={config.get('num_hidden_layers')}: each layer must have the three"
        )
    config.update(
        model_type=family.kind,
        architectures=[family.architecture],
        **family.settings(experts, top_k, config["intermediate_size"]),
    )
    made: list[Step] = []
    for step in steps:
        made.append(_copied(step, family, experts))
        for name, one in step.results.items():
            if (match := _DENSE.match(name)) and match["part"] == "gate":
                number, hidden = layers.index(match["layer"]), one.shape[1]
                router = f"{match['layer']}.{family.block}.gate.weight"
                made.append(_router(router, one.dtype, experts, hidden, number, config.get("initializer_range", 0.02)))
    return made, config


def _family(theirs: Mapping[str, Any] | None) -> _Family:
    if theirs is None:
        raise CheckpointError("there is no config.json that says what is upcycled")
    kind = theirs.get("model_type")
    if kind not in FAMILIES:
        raise CheckpointError(
            f"no mixture of transformers equals a model of kind {kind!r} with experts: only {', '.join(FAMILIES)} have one; "
            "meshfold.experts.upcycle(model) makes a mixture of any model with gated feed-forwards"
        )
    family = FAMILIES[kind]
    if family is _MIXTRAL:
        for name, value in dict(hidden_act="silu", attention_bias=False, mlp_bias=False).items():
            if theirs.get(name, value) != value:
                raise CheckpointError(f"config.json says {name}={theirs[name]!r}, and Mixtral computes with {value!r}")
    return family


def _copied(step: Step, family: _Family, experts: int) -> Step:
    """Return a step that writes each weight of a feed-forward once for every expert."""
    names: list[list[str]] = []
    for name in step.results:
        match = _DENSE.match(name)
        names.append(
            [name]
            if match is None
            else [
                f"{match['layer']}.{family.block}.experts.{number}.{family.parts[match['part']]}.weight"
                for number in range(experts)
            ]
        )
    results = {name: one for group, one in zip(names, step.results.values(), strict=True) for name in group}

    def make(read: Sequence[Tensor]) -> Sequence[Tensor]:
        return [value for group, value in zip(names, step.make(read), strict=True) for _ in group]

    return replace(step, results=results, make=make)


def _router(name: str, dtype: torch.dtype, experts: int, hidden: int, seed: int, std: float) -> Step:
    """Return a step that draws the weight of a router; the same for the same layer, whatever was drawn before."""

    def make(_: Sequence[Tensor]) -> Sequence[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [(std * torch.randn(experts, hidden, generator=generator)).to(dtype)]

    return Step(sources=(), results={name: TensorInfo(dtype=dtype, shape=(experts, hidden))}, make=make)
