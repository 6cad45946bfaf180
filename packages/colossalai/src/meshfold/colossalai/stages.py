"""A rank's stage of the pipeline, as scripts ask a plugin for it."""

from __future__ import annotations

from meshfold.engine.world import PIPE
from meshfold.mesh import Mesh


class StageManager:
    """Answers of one mesh: ``plugin.stage_manager.is_last_stage()``. The loss of a pipeline is known on every rank here.

    Attributes:
        stage: this rank's place in its pipeline.
        num_stages: ranks of a pipeline; 1 without one.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.stage, self.num_stages = mesh.index(PIPE), mesh.size(PIPE)

    def is_first_stage(self, ignore_chunk: bool = True) -> bool:
        """Tell whether this rank is the first of its pipeline."""
        return self.stage == 0

    def is_last_stage(self, ignore_chunk: bool = True) -> bool:
        """Tell whether this rank is the last of its pipeline."""
        return self.stage == self.num_stages - 1

    is_first_device, is_last_device = is_first_stage, is_last_stage
