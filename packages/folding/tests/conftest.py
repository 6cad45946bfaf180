"""Setup of the folding tests: they import the helpers beside them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # tests import the helpers that lie beside them
