"""Conversion: split any nn.Module over the tensor axes of a mesh, in place."""
