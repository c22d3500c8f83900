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

*Early* reads. A kernel's programs are placed when the predecessor's have all returned from their
waits: so what was written before the predecessor's own predecessor had ended can be read before
``begin``, too, if whoever launches the kernel knows that it was (``early``). It is read past the
first-level cache (``.cg``), which may hold lines of an earlier replay; the memory must not be given
out again within the step. A prefetch into L2 may name anything that exists.

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
LINE_BYTES = tl.constexpr(128)  # that a prefetch brings


@triton.jit
def begin(PDL: tl.constexpr):
    """Wait for the kernel before and let the next one start; nothing without *PDL*."""
    if PDL:
        if TRIGGER_FIRST:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if not TRIGGER_FIRST:
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def call_into_l2(p_lines):
    """Prefetch the line of each address: constants or what *early* reads; nothing waits for it."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [p_lines.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
