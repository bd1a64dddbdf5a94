"""Proofs on record and what they need, `python -m tools.NAME`; helpers of the tests are imported from there."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
