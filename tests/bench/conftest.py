"""The benchmark scripts stand in no package: their folder is put on the path."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "bench"))
