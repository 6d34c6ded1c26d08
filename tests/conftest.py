"""Shared by all tests: the folders that tests import from."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("unit",):
    sys.path.insert(0, str(Path(__file__).parent / folder))
