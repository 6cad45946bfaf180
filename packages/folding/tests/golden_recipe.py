"""Compute golden.json with OpenFold's own blocks: python golden_recipe.py, where openfold3 0.5.0 can be imported.

OpenFold 3 has the blocks of AlphaFold 2 too; they are given AlphaFold 2's biases, and its pair bias around the ending
node, which OpenFold 3 transposes. Only their results are stored.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import golden_cases as cases
from folding_models import MSA_SIZES, PAIRFORMER_SIZES, C
from torch import Tensor, nn

HERE = Path(__file__).parent


def biased(settings: Any) -> Any:
    """Return settings of linear layers with AlphaFold 2's biases: everywhere but in queries, keys, values and pair biases."""
    made = copy.deepcopy(settings)
    for name, value in made.items():
        if "bias" in value:
            value.bias = name not in ("linear_q", "linear_k", "linear_v") and not ("mha" in made and name == "linear_z")
        elif hasattr(value, "items"):
            made[name] = biased(value)
    return made


def theirs(kind: str) -> nn.Module:
    """Return OpenFold's block."""
    from openfold3.core.config import default_linear_init_config as settings
    from openfold3.core.model.latent.evoformer import EvoformerBlock
    from openfold3.core.model.latent.pairformer import PairFormerBlock
    from openfold3.core.model.latent.template_module import TemplatePairBlock
    from openfold3.core.model.layers.msa import MSAColumnGlobalAttention

    alphafold_2 = biased(settings.evo_block_init)
    shared: dict[str, Any] = dict(transition_type="relu", fuse_projection_weights=False, inf=1e9)
    made: nn.Module
    if kind == "template":
        made = TemplatePairBlock(
            C, 6, 4, 2, "relu", 2, 0.0, False, False, False, 1e9, linear_init_params=alphafold_2.pair_block
        )
    elif kind == "pairformer":
        made = PairFormerBlock(pair_dropout=0.0, **PAIRFORMER_SIZES, **(shared | dict(transition_type="swiglu")))
    else:
        made = EvoformerBlock(
            msa_dropout=0.0,
            pair_dropout=0.0,
            opm_first=kind == "multimer",
            no_column_attention=False,
            eps=1e-10,
            linear_init_params=alphafold_2,
            **MSA_SIZES,
            **shared,
        )
        if kind == "extra":

            class GlobalColumns(MSAColumnGlobalAttention):  # type: ignore[misc]
                def forward(self, m: Tensor, mask: Tensor, **_: Any) -> Tensor:
                    found: Tensor = super().forward(m, mask)
                    return found

            made.msa_att_col = GlobalColumns(C, 4, 2, linear_init_params=biased(settings.msa_global_att_init))
    if kind != "pairformer":
        stack = made if kind == "template" else made.pair_stack
        inner = stack.tri_att_end.forward

        def as_in_alphafold_2(*arguments: Any, **settings: Any) -> Tensor:
            found: Tensor = inner(*arguments, **(settings | dict(transpose_bias=False)))
            return found

        stack.tri_att_end.forward = as_in_alphafold_2
    return made.double()


def our_name(name: str) -> str:
    """Return the name that OpenFold 2 has for a parameter of OpenFold 3."""
    name = name.replace("transition_mlp.layers.0.0", "linear_1").replace("transition_mlp.linear_out", "linear_2")
    return re.sub(r"(tri_att_(start|end))\.linear_z\.", r"\1.linear.", name)


def main() -> None:
    """Write golden.json."""
    found = {}
    for kind in cases.KINDS:
        block = theirs(kind)
        named = {our_name(name): parameter for name, parameter in block.named_parameters()}
        assert sorted(named) == sorted(name for name, _ in cases.ours(kind).named_parameters()), kind
        cases.fill(named)
        cases.ours(kind).load_state_dict(block.state_dict())
        found[kind] = cases.results(block, named, kind)
    (HERE / "golden.json").write_text(json.dumps(found, indent=0) + "\n")


if __name__ == "__main__":
    main()
