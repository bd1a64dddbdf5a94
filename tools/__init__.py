"""Proofs on record and what they need, `python -m tools.NAME`; helpers of the tests are imported from there."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
