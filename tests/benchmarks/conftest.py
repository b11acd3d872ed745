"""The benchmarks are a package at the root of the repository, beside the library."""

from __future__ import annotations

import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent

for folder in (_HERE, _HERE.parents[1]):  # tiny_benchmark lives here, benchmarks at the root
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
