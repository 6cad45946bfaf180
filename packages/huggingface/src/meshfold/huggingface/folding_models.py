"""Folding models of transformers, ESMFold and ESMFold 2, split by an axial mode and asked for structures.

The language model runs whole on every rank. Pair tensors are split; ESMFold's also in its structure module and for its confidences,
and those of ESMFold 2 are whole after its trunk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.folding import (
    PAIRS_OF_ESMFOLD2,
    EsmFoldTrunk,
    MemoryPlan,
    MemoryPlanError,
    Stack,
    parallelize_folding,
    plan_memory,
    structure_bytes,
)
from meshfold.huggingface.confidence import confidence_bytes, confidence_of_rows
from meshfold.huggingface.folding_inputs import LINKER, complex_features, join_chains
from meshfold.huggingface.structure import Atom, Structure
from meshfold.mesh import Mesh
from meshfold.mesh.spec import format_bytes

OnPass = Callable[[int, int], None]
"""Called before each pass through the trunk with its number, from 0, and how many there are."""


class FoldingModel(ABC):
    """A folding model that is loaded and split."""

    def __init__(self, model: nn.Module, mesh: Mesh, mode: str) -> None:
        """Args:
        model: transformers' model, after :func:`meshfold.folding.parallelize_folding`.
        mesh, mode: as it was split.
        """
        self.model: Any = model
        self.mesh, self.mode = mesh, mode

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        first: Tensor = next(self.model.parameters())
        return first.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the trunk's weights."""
        first: Tensor = next(self.blocks.parameters())
        return first.dtype

    @abstractmethod
    def tokens(self, chains: Sequence[str]) -> int:
        """Return the side of the pair tensor: residues, and what is added to join chains."""

    @property
    @abstractmethod
    def pair_channels(self) -> int:
        """The channels of the pair tensor."""

    @property
    @abstractmethod
    def stack(self) -> Stack:
        """The blocks of the trunk, with these weights or on the meta device."""

    @property
    @abstractmethod
    def blocks(self) -> nn.ModuleList:
        """The blocks themselves."""

    @abstractmethod
    def pairs_beside(self, tokens: int) -> int:
        """Return the bytes of what a rank holds of pairs of so many tokens beside the stack, while its blocks run."""

    def pairs_after(self, tokens: int) -> int:
        """Return the bytes of what a rank holds of pairs after the stack: in the structure module and for confidences."""
        return 0

    def plan_memory(self, chains: Sequence[str], limit: int) -> MemoryPlan:
        """Choose the chunks in which the trunk computes; :meth:`use_plan` sets them.

        Args:
            chains: amino acids of each chain.
            limit: bytes of a device for weights, and for the trunk while its blocks run.

        Raises:
            MemoryPlanError: if the trunk, or what follows it, does not fit.
        """
        tokens, parameter = self.tokens(chains), next(self.blocks.parameters())
        blocks = {id(weight) for weight in self.blocks.parameters()}
        weights = (w.numel() * w.element_size() for w in self.model.parameters() if id(w) not in blocks)
        plan = plan_memory(
            self.stack,
            residues=tokens,
            mode=self.mode,
            axes=dict(self.mesh.axes),
            limit=limit,
            training=False,
            dtype=parameter.dtype,
            other_bytes=sum(weights) + self.pairs_beside(tokens),
            kernels=parameter.is_cuda,
        )
        plan = replace(plan, after_bytes=self.pairs_after(tokens))
        if not plan.fits:
            fixed = plan.weights + plan.other_bytes
            shorter = int(tokens * (max(limit - fixed, 0) / plan.after_bytes) ** 0.5) // 16 * 16
            raise MemoryPlanError(
                f"{tokens} residues do not fit into {format_bytes(limit)} over {plan.run.ranks}: the structure module and the "
                f"confidences after the trunk need {format_bytes(plan.bytes)}. Give about {shorter} residues, or more ranks.",
                least=plan.bytes,
                fixed=fixed,
                residues=shorter,
            )
        return plan

    def use_plan(self, plan: MemoryPlan) -> None:
        """Let the trunk compute in the chunks of a plan."""
        parallelize_folding(self.model, self.mesh, self.mode, memory=plan.settings)

    @abstractmethod
    def predict(
        self, chains: Sequence[str], recycles: int | None = None, *, seed: int = 0, on_pass: OnPass | None = None
    ) -> Structure:
        """Return the structure of a protein; all ranks call, and all get the same.

        Args:
            chains: amino acids of each chain in capital letters.
            recycles: passes after the first one; None: those of the configuration.
            seed: of what is drawn (ESMFold 2).
            on_pass: called before each pass.
        """


class EsmFold(FoldingModel):
    """ESMFold: chains are joined by linkers, which are left out of what is returned."""

    def __init__(self, model: nn.Module, mesh: Mesh, mode: str) -> None:
        super().__init__(model, mesh, mode)
        self.model.trunk.keeps_rows = True

    def tokens(self, chains: Sequence[str]) -> int:
        return sum(map(len, chains)) + LINKER * (len(chains) - 1)

    @property
    def pair_channels(self) -> int:
        return int(self.model.config.esmfold_config.trunk.pairwise_state_dim)

    @property
    def stack(self) -> Stack:
        trunk: EsmFoldTrunk = self.model.trunk
        return trunk.stack()

    @property
    def blocks(self) -> nn.ModuleList:
        found: nn.ModuleList = self.model.trunk.blocks
        return found

    def pairs_beside(self, tokens: int) -> int:
        return 2 * 8 * -(-(tokens**2) // self.mesh.world_size)  # rows of the tables of distances and positions

    def pairs_after(self, tokens: int) -> int:
        axes, trunk = self.model.trunk.axes, self.model.trunk
        padded = axes.padded(tokens)
        ranks, columns = axes.mesh.size(*axes.rows), axes.mesh.size(*axes.columns)
        shape = (1, padded // ranks, tokens, self.pair_channels)
        pairs = torch.empty(shape, dtype=self.dtype, device="meta")
        own = pairs.numel() * pairs.element_size()
        block = own // columns if columns > 1 else 0  # with all columns it is another tensor
        structure = structure_bytes(trunk.structure_module.ipa, pairs)
        return max(block + structure, confidence_bytes(pairs, ranks))

    def _through_trunk(
        self, types: Tensor, positions: Tensor, recycles: int | None, on_pass: OnPass | None
    ) -> dict[str, Any]:
        """Return what the trunk returns, as in ``EsmForProteinFolding.forward``, with this rank's rows of pairs."""
        model, config = self.model, self.model.config.esmfold_config
        mask, residues = torch.ones_like(types), types.shape[1]
        states = model.compute_language_model_representations(model.af2_idx_to_esm_idx(types, mask))
        states = states.to(model.esm_s_combine.dtype) * (0 if config.esm_ablate_sequence else 1)
        single = model.esm_s_mlp((model.esm_s_combine.softmax(0).unsqueeze(0) @ states).squeeze(2))
        if config.embed_aa:
            single = single + model.embedding(types)
        del states
        zeros = single.new_zeros(()).expand(1, residues, residues, self.pair_channels)
        trunk: EsmFoldTrunk = model.trunk
        trunk.on_recycle = on_pass
        try:
            found: dict[str, Any] = trunk(single, zeros, types, positions, mask, recycles)
        finally:
            trunk.on_recycle = None
        return found

    @torch.no_grad()
    def predict(
        self, chains: Sequence[str], recycles: int | None = None, *, seed: int = 0, on_pass: OnPass | None = None
    ) -> Structure:
        from transformers.models.esm.modeling_esmfold import categorical_lddt
        from transformers.models.esm.openfold_utils import residue_constants as known

        letters, positions, kept = join_chains(chains)
        types = torch.tensor([[known.restype_order_with_x[letter] for letter in letters]], device=self.device)
        out = self._through_trunk(types, torch.tensor([positions], device=self.device), recycles, on_pass)
        keep = torch.tensor(kept, device=self.device)
        bins = self.model.lddt_head(out["states"][-1]).unflatten(-1, (-1, self.model.lddt_bins))
        plddt = (100 * categorical_lddt(bins, bins=self.model.lddt_bins)[0][keep].float()).cpu()
        where = out["positions"][-1, 0][keep].float().cpu().tolist()
        names = [known.restype_1to3.get(letter, "UNK") for letter in "".join(chains)]
        atoms = [
            Atom(
                residue=residue,
                name=atom,
                position=tuple(where[residue][number]),
                plddt=float(plddt[residue, known.atom_order[atom]]),
            )
            for residue, name in enumerate(names)
            for number, atom in enumerate(known.restype_name_to_atom14_names[name])
            if atom
        ]
        lengths = [len(chain) for chain in chains]
        pae, ptm, iptm = confidence_of_rows(out["s_z"], self.model.ptm_head, keep, lengths, largest=31.0)
        return Structure(
            chains=tuple(chains),
            residue_names=tuple(names),
            atoms=tuple(atoms),
            plddt=plddt[:, known.atom_order["CA"]],
            pae=pae.cpu(),
            ptm=ptm,
            iptm=iptm,
        )


class EsmFold2(FoldingModel):
    """ESMFold 2: chains have numbers of their own; of several samples the one with the best pTM is returned."""

    def tokens(self, chains: Sequence[str]) -> int:
        return sum(map(len, chains))

    @property
    def pair_channels(self) -> int:
        return int(self.model.config.pairwise_hidden_size)

    @property
    def stack(self) -> Stack:
        found: Stack = self.model.folding_trunk
        return found

    @property
    def blocks(self) -> nn.ModuleList:
        return self.stack.blocks

    def pairs_beside(self, tokens: int) -> int:
        return tokens**2 * PAIRS_OF_ESMFOLD2 * self.pair_channels * next(self.blocks.parameters()).element_size()

    @torch.no_grad()
    def predict(
        self, chains: Sequence[str], recycles: int | None = None, *, seed: int = 0, on_pass: OnPass | None = None
    ) -> Structure:
        from transformers.models.esmfold2 import protein_utils as known

        features = complex_features([known.prepare_protein_features(chain) for chain in chains], chains)
        passes = max(1, (self.model.config.num_loops if recycles is None else recycles) + 1)
        count = 0

        def announce(*_: Any) -> None:
            nonlocal count
            if on_pass is not None:
                on_pass(count, passes)
            count += 1

        hook = self.model.folding_trunk.register_forward_pre_hook(announce)
        torch.manual_seed(seed)  # all ranks draw the same
        try:
            at_device = {name: value.to(self.device) for name, value in features.items()}
            out = self.model.fold(**at_device, num_loops=recycles)
        finally:
            hook.remove()
        best = int(out.ptm.float().argmax())
        where = out.sample_atom_coords.flatten(0, -3)[best].float().cpu().tolist()
        confidence = (100 * out.plddt_per_atom[best].float()).cpu().tolist()
        names = [known.PROTEIN_1TO3.get(letter, "UNK") for letter in "".join(chains)]
        made = [(residue, atom) for residue, name in enumerate(names) for atom in known.PROTEIN_HEAVY_ATOMS[name]]
        return Structure(
            chains=tuple(chains),
            residue_names=tuple(names),
            atoms=tuple(
                Atom(residue=residue, name=atom, position=tuple(where[number]), plddt=confidence[number])
                for number, (residue, atom) in enumerate(made)
            ),
            plddt=(100 * out.plddt[best].float()).cpu(),
            pae=out.pae[best].float().cpu(),
            ptm=float(out.ptm[best]),
            iptm=float(out.iptm[best]) if len(chains) > 1 else None,
        )


PREDICTORS: dict[str, type[FoldingModel]] = {
    "EsmForProteinFolding": EsmFold,
    "EsmFold2Model": EsmFold2,
}
"""Folding models by the name of their class in transformers."""
