"""Computation of few rows, as a generated token has them: layers of a model in few kernels, split over ranks or not.

A generator enters these for steps of running sequences: products of a single row (``row_kernels.py``), sums over ranks with the
norms after them (``fused_sums.py`` by ``one_shot_sums.py``), the choice of words that ranks split (``split_words.py``), or
compiled blocks (``compiled.py``). ``measured.py`` chooses programs by measurement.
"""

from meshfold.tensor_parallel.few_rows.compiled import CompiledBlocks
from meshfold.tensor_parallel.few_rows.fused_sums import FusedSums
from meshfold.tensor_parallel.few_rows.measured import agreement, choose_row_programs
from meshfold.tensor_parallel.few_rows.one_shot_sums import OneShot
from meshfold.tensor_parallel.few_rows.row_kernels import RowKernels
from meshfold.tensor_parallel.few_rows.split_words import SplitWords, split_words

__all__ = [
    "CompiledBlocks",
    "FusedSums",
    "OneShot",
    "RowKernels",
    "SplitWords",
    "agreement",
    "choose_row_programs",
    "split_words",
]
