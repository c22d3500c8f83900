"""The garbage collector's settings in a long-lived process."""

import subprocess
import sys

PROGRAM = """
import gc
from zlm.process import garbage
garbage.settle()
print(gc.get_threshold() == garbage.THRESHOLDS, gc.get_freeze_count() > 1000, gc.isenabled())
"""


def test_what_is_loaded_is_never_looked_at_again() -> None:
    told = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert told.stdout.split() == ["True", "True", "True"], told.stderr
