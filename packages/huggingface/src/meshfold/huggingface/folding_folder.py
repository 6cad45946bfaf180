"""Folders of folding models, ESMFold and ESMFold 2: opened, outlined for a plan, and loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshfold.checkpoint.tensors import has_weights
from meshfold.folding import PAIRS_OF_ESMFOLD2, FoldingOutline, adopt_models, parallelize_folding
from meshfold.huggingface.folder_config import NO_REMOTE_CODE, read_config, read_raw_config, require_config
from meshfold.huggingface.folding_models import PREDICTORS, FoldingModel
from meshfold.mesh import Mesh, SpecError


@dataclass(frozen=True)
class FoldingFolder:
    """A folder of a folding model; nothing of it is loaded yet.

    Attributes:
        folder: where.
        model_class: its class in transformers.
    """

    folder: Path
    model_class: str

    def load(
        self, mesh: Mesh, mode: str = "dap", *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> FoldingModel:
        """Load the weights and split the trunk.

        Args:
            mesh: the ranks; of one rank too.
            mode: the axial mode.
            device: where it runs.
            dtype: of the weights; the language model of an ESMFold folder that asks for it runs in float16 on a GPU.

        Raises:
            SpecError: if weights are missing or damaged, or transformers is too old.
        """
        import transformers

        what = f"model {str(self.folder)!r}"
        model_class = getattr(transformers, self.model_class, None)
        if model_class is None:
            raise SpecError(f"{what} needs {self.model_class} of transformers: pip install 'transformers>=5.17'")
        config = read_config(self.folder, what)
        at = torch.device(device)
        if self.model_class == "EsmForProteinFolding":
            config.esmfold_config.fp16_esm = bool(config.esmfold_config.fp16_esm) and at.type == "cuda"
        try:
            model, told = model_class.from_pretrained(
                str(self.folder), config=config, dtype=dtype, output_loading_info=True, **NO_REMOTE_CODE
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise SpecError(f"{what}: its weights cannot be read: {error}") from error
        missing = sorted(name for name in told["missing_keys"] if "contact_head" not in name)  # which is not used
        if missing:
            raise SpecError(f"{what}: {len(missing)} tensors are missing in its weights, such as {missing[0]}")
        model.to(at).eval().requires_grad_(False)
        if self.model_class == "EsmForProteinFolding" and config.esmfold_config.fp16_esm:
            model.esm.half()
        parallelize_folding(model, mesh, mode)
        return PREDICTORS[self.model_class](model, mesh, mode)


def outline_folding(folder: str | os.PathLike[str], given: str = "") -> FoldingOutline:
    """Return what a plan needs of a folder's ESMFold or ESMFold 2, from its configuration: no weight is read.

    Args:
        folder: where.
        given: the user's text, for errors.

    Raises:
        SpecError: for a folder of another class, or if transformers is too old for it.
    """
    import transformers

    given = given or f"model {str(folder)!r}"
    require_config(folder, given)
    told = read_raw_config(Path(folder))
    second = told.get("model_type") == "esmfold2"
    if not second and (told.get("model_type") != "esm" or not told.get("is_folding_model")):
        raise SpecError(
            f"{given}: only ESMFold and ESMFold 2 have a plan of memory: give a folder of EsmForProteinFolding or EsmFold2Model"
        )
    model_class = getattr(transformers, "EsmFold2Model" if second else "EsmForProteinFolding", None)
    if model_class is None:
        raise SpecError(f"{given} needs EsmFold2Model of transformers: pip install 'transformers>=5.17'")
    with torch.device("meta"):
        model: Any = model_class(read_config(Path(folder), given))
        adopt_models(model)
    stack = model.folding_trunk if second else model.trunk.stack()
    beside = sum(weight.numel() for weight in model.parameters()) - sum(w.numel() for w in stack.parameters())
    channels = dict(whole_channels=PAIRS_OF_ESMFOLD2 * stack.c_z) if second else dict(recycled_channels=stack.c_z)
    return FoldingOutline(name=str(folder), stack=stack, frozen_bytes=2 * beside, **channels)


def open_folding(folder: str | os.PathLike[str], given: str = "") -> FoldingFolder:
    """Check that a folder has a folding model and weights; nothing is loaded or downloaded.

    Args:
        folder: where.
        given: the user's text, for errors.

    Raises:
        SpecError: if there is no such folder, it is of another class, or has no weights.
    """
    given = given or f"model {str(folder)!r}"
    require_config(folder, given)
    told = read_raw_config(Path(folder))
    named = [str(name) for name in told.get("architectures") or ()]
    if not named and told.get("model_type") == "esm" and told.get("is_folding_model"):
        named = ["EsmForProteinFolding"]
    found = next((name for name in named if name in PREDICTORS), None)
    if found is None:
        kind = named[0] if named else f"a model of type {told.get('model_type', 'unknown')!r}"
        raise SpecError(f"{given}: it has {kind}, which does not fold: give a folder of {' or '.join(PREDICTORS)}")
    if not has_weights(Path(folder)):
        raise SpecError(f"{given}: it has no weights, and random ones predict nothing")
    return FoldingFolder(Path(folder), found)
