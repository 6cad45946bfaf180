"""Which dims of which tensors are split, while a model's own code runs: nothing is computed on a piece in silence.

See :mod:`meshfold.mesh.tracking.follow`.
"""

from meshfold.mesh.tracking.active import Lies, lies, part_of_model, say, tracker, untracked, unwatched
from meshfold.mesh.tracking.watch import Watched, watch

__all__ = ["Lies", "Watched", "lies", "part_of_model", "say", "tracker", "untracked", "unwatched", "watch"]
