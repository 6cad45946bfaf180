"""Conversion: split any nn.Module over the tensor axes of a mesh, in place."""

from meshfold.tensor_parallel.convert.functional_dropout import FunctionalDropout
from meshfold.tensor_parallel.convert.huggingface import find_functional_dropout, recompute_contexts
from meshfold.tensor_parallel.convert.model_adapter import attention_part, padding_for_decoding, row_multiple
from meshfold.tensor_parallel.convert.own_tokens import OwnTokens
from meshfold.tensor_parallel.convert.parallelize import parallelize
from meshfold.tensor_parallel.convert.report import Placed, Report
from meshfold.tensor_parallel.convert.roles import ROLES, check_rules

__all__ = [
    "ROLES",
    "FunctionalDropout",
    "OwnTokens",
    "Placed",
    "Report",
    "attention_part",
    "check_rules",
    "find_functional_dropout",
    "padding_for_decoding",
    "parallelize",
    "recompute_contexts",
    "row_multiple",
]
