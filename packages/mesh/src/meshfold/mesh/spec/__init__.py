"""The parallel spec: the one line of a training script that says how a model is folded over devices.

``parallel = dict(data=2, pipeline=2, tensor=dict(mode="2.5d", size=8, depth=2))`` is a user's spec. ``ParallelSpec.parse`` returns
a checked, frozen object, or raises a ``SpecError`` that says what to change. Pure Python: no process group, no device, no tensor
library.
"""

from __future__ import annotations

from meshfold.mesh.errors import SpecError
from meshfold.mesh.spec import argument_checks
from meshfold.mesh.spec.argument_checks import reject_unknown_arguments, signature_mismatch
from meshfold.mesh.spec.axial import AxialSpec
from meshfold.mesh.spec.entry import divisors, format_value, join_choices
from meshfold.mesh.spec.expert import EXCHANGES, ExpertSpec
from meshfold.mesh.spec.parallel import ParallelSpec, is_importable
from meshfold.mesh.spec.pipeline import PipelineSpec
from meshfold.mesh.spec.sequence import SequenceSpec
from meshfold.mesh.spec.tensor import TensorMode, TensorSpec
from meshfold.mesh.spec.text import UNITS, format_bytes, format_table, parse_bytes
from meshfold.mesh.spec.zero import ZeroSpec

__all__ = [
    "EXCHANGES",
    "UNITS",
    "AxialSpec",
    "ExpertSpec",
    "ParallelSpec",
    "PipelineSpec",
    "SequenceSpec",
    "SpecError",
    "TensorMode",
    "TensorSpec",
    "ZeroSpec",
    "argument_checks",
    "divisors",
    "format_bytes",
    "format_table",
    "format_value",
    "is_importable",
    "join_choices",
    "parse_bytes",
    "reject_unknown_arguments",
    "signature_mismatch",
]
