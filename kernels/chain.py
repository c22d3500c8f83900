"""Programmatic dependent launch: a kernel starts while the one before it still runs (sm90 on).

A decode step is a chain of some hundred kernels of a few microseconds, each of which needs what the
one before wrote. Launched one after another, a kernel's start, its first instructions and its reads
of weights all wait for the end of its predecessor. A kernel launched with ``launch_pdl`` may start
once every program of its predecessor has begun, and itself says where it must wait:

    weights, tables and other constants are loaded (nothing in a step writes them)
    begin(PDL)      lets the next kernel start; waits until the predecessor has ended
    everything else

Why this is right, whatever stands in the chain. ``begin`` returns when the predecessor has ended
and its writes can be seen, and the predecessor ended only after its own ``begin`` had returned; so
by induction every earlier kernel has ended, not only the last. Hence after ``begin`` a program may
read what any of them wrote (RAW), and write over what any of them read or wrote (WAR, WAW), which
includes memory that a graph's pool has given out twice. Before it a program must do neither. Both
rest on two rules for every kernel that is launched with ``launch_pdl``:

  * every program calls ``begin``, unconditionally, before its first access to anything but
    constants. One that did not would break the order for all that come after it;
  * a constant was written before the step was launched, by work that has been waited for (weights
    after their load are; a slot's sampling parameters, which a join writes, are not constants).

A kernel without ``launch_pdl`` (cuBLAS, torch, a copy) takes part in neither direction: it starts
when its predecessor has ended, and its successor's ``begin`` waits for its end.

When the next kernel may start does not matter for any of this. It is let in after the wait. Before
it, several kernels would stand in line on the card (they cannot lock each other out: a kernel's
programs are placed only when all of its predecessor's have been), each with its weights loaded, but
they take room from the one that runs: on an H200 a step of small vector products gained 1 %, one
of tiles lost 33 %.
"""

import triton
import triton.language as tl

TRIGGER_FIRST = tl.constexpr(False)


@triton.jit
def begin(PDL: tl.constexpr):
    """Wait for the kernel before and let the next one start; nothing without *PDL*."""
    if PDL:
        if TRIGGER_FIRST:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if not TRIGGER_FIRST:
            tl.extra.cuda.gdc_launch_dependents()
