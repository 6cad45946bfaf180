"""The stages and ranks that use each block, parameter and buffer of a model that is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from meshfold.pipeline.runtime.blocks import Blocks
from meshfold.pipeline.runtime.forward_analysis import ForwardAnalysis


@dataclass(frozen=True, kw_only=True)
class StageAssignment:
    """The stage of each block, and the stages that use each tensor.

    Attributes:
        blocks: the repeated block.
        look: where the forward uses modules and tensors.
        stage_of_block: by the number of a block.
        stage_ranks: the rank of every stage.
    """

    blocks: Blocks
    look: ForwardAnalysis
    stage_of_block: tuple[int, ...]
    stage_ranks: tuple[int, ...]

    @classmethod
    def of(
        cls, blocks: Blocks, look: ForwardAnalysis, bounds: Sequence[int], stage_ranks: Sequence[int]
    ) -> StageAssignment:
        """Assign blocks to stages by their bounds."""
        stages = [stage for stage in range(len(stage_ranks)) for _ in range(bounds[stage], bounds[stage + 1])]
        return cls(blocks=blocks, look=look, stage_of_block=tuple(stages), stage_ranks=tuple(stage_ranks))

    def stage_behind(self, block: int) -> int:
        """Return the stage of the code behind a block; -1: before the first."""
        return self.stage_of_block[max(block, 0)]

    def blocks_of(self, rank: int) -> list[int]:
        """Return the numbers of the blocks that a rank keeps."""
        return [i for i, stage in enumerate(self.stage_of_block) if self.stage_ranks[stage] == rank]

    def stages_of(self, name: str) -> set[int]:
        """Return the stages that use a tensor of this name; of one that the forward does not use, the last."""
        index = self.blocks.index_of(name)
        called = {self.stage_behind(behind) for behind in self.look.uses.get(name, ())}
        if index is not None:
            return {self.stage_of_block[index], *called}
        return called or {len(self.stage_ranks) - 1}

    def ranks_of(self, name: str) -> set[int]:
        """Return the ranks of these stages."""
        return {self.stage_ranks[stage] for stage in self.stages_of(name)}

    def called_outside(self, rank: int) -> list[nn.Module]:
        """Return the modules inside of blocks that a rank's stages call from elsewhere."""
        return [
            module
            for module, behind in self.look.called_outside.items()
            if rank in {self.stage_ranks[self.stage_behind(index)] for index in behind}
        ]
