"""Pictures of meshes, matmuls and modes; needs matplotlib (the extra ``plot``)."""
