"""Garbage collection in a process that lives long: rarely, and never over what it started with.

Messages and steps die by reference count; cycles are few. With the interpreter's own thresholds a
busy process looks for them hundreds of times a second, each time over all that came since the last.
"""

import gc

THRESHOLDS = (50_000, 20, 50)


def pause() -> None:
    """Look for none while modules are imported: a sixth of the time that torch's take."""
    gc.disable()


def resume() -> None:
    """Look for it again; what was imported is never looked at."""
    gc.freeze()
    gc.enable()


def settle() -> None:
    """Collect once; what is there now is never looked at again. Call when all is loaded."""
    gc.set_threshold(*THRESHOLDS)
    gc.collect()
    gc.freeze()
