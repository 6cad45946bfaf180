"""Measure side by side with peers: results as JSON, and tables and plots made from them.

  meshfold bench --list
  meshfold bench tensor-parallel --ranks 4

Benchmarks are in the repository's folder benchmarks/; what follows the name goes to the benchmark.
"""

from __future__ import annotations

import argparse

from meshfold.cli import reproduce

configure = reproduce.configure


def run(arguments: argparse.Namespace) -> int:
    """Run ``meshfold bench``."""
    return reproduce.run(arguments, "benchmarks")
