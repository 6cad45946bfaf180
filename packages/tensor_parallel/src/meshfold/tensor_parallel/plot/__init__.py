"""Pictures of meshes, matmuls and modes; needs matplotlib (the extra ``plot``)."""

from meshfold.tensor_parallel.plot.figures import draw_matmul, draw_mesh, draw_mode

__all__ = ["draw_matmul", "draw_mesh", "draw_mode"]
