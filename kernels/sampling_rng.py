"""The worker's counter-based random numbers inside a kernel: the same bits as ``zlm.worker.rng``.

Device functions only, for the sampling kernels. ``row_key`` hashes (seed, position) to two words,
``exponential`` hashes those with token ids to standard exponential variates. The integers are
exact, so CPU and GPU race with the same variates up to the last bits of a logarithm; which token
wins can differ only where two weights are equal to about 1e-6.
"""

import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MIX_A = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_B = tl.constexpr(0x94D049BB133111EB)
LOW_A = tl.constexpr(0x7FEB352D)
LOW_B = tl.constexpr(0x846CA68B)
UNIT = tl.constexpr(2.0**-31)
LARGEST_UNIFORM = tl.constexpr(1.0 - 2.0**-24)  # float32's last value below 1


@triton.jit
def _mix64(z):
    z = (z ^ (z >> 30)) * MIX_A
    z = (z ^ (z >> 27)) * MIX_B
    return z ^ (z >> 31)


@triton.jit
def _mix32(x):
    x = (x ^ (x >> 16)) * LOW_A
    x = (x ^ (x >> 15)) * LOW_B
    return x ^ (x >> 16)


@triton.jit
def row_key(seed, position):
    """Return two uint32 words of a *seed* (64 bits, any integer type) and a *position*."""
    z = seed.to(tl.uint64) + GOLDEN
    mixed = _mix64(_mix64(z) + position.to(tl.uint64) * GOLDEN)
    return (mixed & 0xFFFFFFFF).to(tl.uint32), (mixed >> 32).to(tl.uint32)


@triton.jit
def neg_log1m(u):
    """Return -log(1 - u), float32, for u in [0, 1): within 2e-7 of it also near 0.

    Near 0, where races are decided, ``log`` of a rounded 1 - u would be no use: there it is the
    series of 2 atanh(u / (2 - u)), whose next term is under 1e-9 of the first at u = 0.25.
    """
    s = u / (2.0 - u)
    q = s * s
    series = 2.0 * s * (1.0 + q * (0.33333334 + q * (0.2 + q * (0.14285715 + q * 0.11111111))))
    return tl.where(u < 0.25, series, -tl.log(1.0 - u))


@triton.jit
def exponential(ids, low, high):
    """Return standard exponential variates, float32, of int32 token *ids* under key (low, high)."""
    x = _mix32(_mix32(ids.to(tl.uint32) ^ low) + high)
    noise = (x & 0x7FFFFFFF).to(tl.int32).to(tl.float32)
    return neg_log1m(tl.minimum((noise + 0.5) * UNIT, LARGEST_UNIFORM))
