"""Folding models of transformers: the modules that hold pair tensors are replaced by ours, with the same parameters.

==================== =========================== =========================
transformers         module                      ours
==================== =========================== =========================
EsmForProteinFolding ``EsmFoldingTrunk``         :class:`.EsmFoldTrunk`
EsmFold2Model        ``EsmFold2PairUpdateStack`` :class:`.PairUpdateStack`
EsmFold2Model        ``EsmFold2MSAEncoder``      :class:`.MSAEncoder`
==================== =========================== =========================

Modules are told by the names of their classes, so transformers need not be installed. Parameters keep their names and stay the same
objects: state dicts, optimizers and ``save_pretrained`` notice nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meshfold.folding.esmfold import EsmFoldBlock
from meshfold.folding.esmfold2 import MSAEncoder, MSAEncoderLayer, PairUpdateStack
from meshfold.folding.esmfold_trunk import EsmFoldTrunk
from meshfold.mesh import LayoutError


def adopt_models(model: nn.Module) -> nn.Module:
    """Replace the modules of transformers' folding models that hold pair tensors by ours, in place; return the model.

    Outputs and gradients stay the same, to rounding. Other models are not changed.

    Raises:
        LayoutError: if the model itself is such a module, or its parameters are not those of a version that is known.
    """
    for name, module in list(model.named_modules()):
        make = _maker_of(module)
        if make is None or next(module.parameters(), None) is None:
            continue
        if not name:
            raise LayoutError(f"{type(module).__name__} cannot be replaced in place: give the model that contains it")
        with torch.device("meta"):
            ours = make(module)
        take_parameters(ours, module)
        model.set_submodule(name, ours)
    return model


def take_parameters(ours: nn.Module, theirs: nn.Module) -> None:
    """Give a module the parameters of another one that has the same names, and its mode of training.

    Raises:
        LayoutError: if names or shapes differ.
    """
    given = dict(theirs.named_parameters())
    mine = dict(ours.named_parameters())
    wrong = sorted(
        name
        for name in {*given, *mine}
        if name not in given or name not in mine or given[name].shape != mine[name].shape
    )
    if wrong:
        raise LayoutError(
            f"{type(theirs).__name__} of {type(theirs).__module__} has other parameters than the one that is known here, such "
            f"as {wrong[0]}: use a version of transformers from 5.17 to 5.23"
        )
    for name, parameter in given.items():
        owner, _, leaf = name.rpartition(".")
        setattr(ours.get_submodule(owner), leaf, parameter)
    ours.train(theirs.training)


def _maker_of(module: nn.Module) -> Callable[[Any], nn.Module] | None:
    for known in type(module).__mro__:
        if known.__module__.startswith("transformers."):
            return MAKERS.get(known.__name__)
    return None


def _esmfold_trunk(theirs: Any) -> nn.Module:
    config = theirs.config
    c_s, c_z = config.sequence_state_dim, config.pairwise_state_dim
    widths = config.sequence_head_width, config.pairwise_head_width
    return EsmFoldTrunk(
        [EsmFoldBlock(c_s, c_z, *widths, config.dropout) for _ in theirs.blocks],
        c_s,
        c_z,
        position_bins=config.position_bins,
        max_recycles=config.max_recycles,
        structure_module=theirs.structure_module,
        trunk2sm_s=theirs.trunk2sm_s,
        trunk2sm_z=theirs.trunk2sm_z,
    )


def _pair_update_stack(theirs: Any) -> nn.Module:
    c_z, c_transition, chunk_size = _pair_sizes(theirs.layers)
    return PairUpdateStack(len(theirs.layers), c_z, c_transition, chunk_size)


def _msa_encoder(theirs: Any) -> nn.Module:
    c_z, c_transition, chunk_size = _pair_sizes(theirs.layers)
    layers = []
    for layer in theirs.layers:
        outer = layer.outer_product_mean
        averaging = getattr(layer, "msa_pair_weighted_averaging", None)
        head_dim, heads = (1, 1) if averaging is None else (averaging.head_dim, averaging.num_attention_heads)
        between = 1 if averaging is None else layer.msa_transition.mlp.down_proj.in_features
        layers.append(
            MSAEncoderLayer(
                outer.hidden_size,
                c_z,
                outer.outer_hidden_size,
                head_dim,
                heads,
                between,
                c_transition,
                chunk_size,
                updates_msa=averaging is not None,
            )
        )
    return MSAEncoder(theirs.embed, theirs.project_inputs, layers, c_z)


def _pair_sizes(layers: Any) -> tuple[int, int, int | None]:
    """Return the channels of pairs, those within transitions, and the rows of a transition at a time."""
    transition = layers[0].pair_transition
    return layers[0].tri_mul_out.dim, transition.mlp.down_proj.in_features, transition.chunk_size


MAKERS: dict[str, Callable[[Any], nn.Module]] = {
    "EsmFoldingTrunk": _esmfold_trunk,
    "EsmFold2PairUpdateStack": _pair_update_stack,
    "EsmFold2MSAEncoder": _msa_encoder,
}
"""Makers of our modules, on the meta device, by the name of the class that they replace."""
