"""Counter-based random numbers: what a request draws depends on its seed and the position alone.

No generator and no state: ``row_keys`` hashes (seed, position of the sampled token) into two words,
``exponentials`` hashes those with a token id into one standard exponential variate. So a request
gets the same draw in any slot, any batch and any company, and after preemption too.

Theory. With E_i independent standard exponentials, ``argmax p_i / E_i`` falls on i with probability
p_i / sum(p): the exponential race, which is the Gumbel-max trick (G = -log E) without its second
logarithm. Only the order matters, so p needs no normalising, and a p of zero never wins.

Sources of the mixing functions: the 64-bit finaliser of SplitMix64 (Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", 2014), and the 32-bit "lowbias32" permutation of Chris
Wellons' hash prospector (2018, public domain), two rounds of it with a key word before each.
Integer products wrap, as torch's do on every device.
"""

import torch
from torch import Tensor

GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
MIX_A = -4658895280553007687  # 0xBF58476D1CE4E5B9
MIX_B = -7723592293110705685  # 0x94D049BB133111EB
LOW_A = 0x7FEB352D
LOW_B = 0x846CA68B - 2**32
LARGEST_UNIFORM = 1.0 - 2.0**-24  # float32's last value below 1


def _mix64(z: Tensor) -> Tensor:
    z = (z ^ ((z >> 30) & (2**34 - 1))) * MIX_A
    z = (z ^ ((z >> 27) & (2**37 - 1))) * MIX_B
    return z ^ ((z >> 31) & (2**33 - 1))


def _mix32_(x: Tensor) -> Tensor:
    """Permute int32 *x* in place; the shifts are logical."""
    x ^= (x >> 16) & 0xFFFF
    x *= LOW_A
    x ^= (x >> 15) & 0x1FFFF
    x *= LOW_B
    x ^= (x >> 16) & 0xFFFF
    return x


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return two key words a row, int32 [n, 2], of *seeds* and *positions*, both int64 [n].

    A seed is an unsigned 64-bit number, stored as the int64 of the same bits.
    """
    mixed = _mix64(_mix64(seeds + GOLDEN) + positions * GOLDEN)
    return mixed.unsqueeze(1).view(torch.int32)


def exponentials(keys: Tensor, ids: Tensor) -> Tensor:
    """Return standard exponential variates, float32 [n, m], of token *ids* under row *keys*.

    ``keys`` is int32 [n, 2]; ``ids`` is int32 [n, m] or [1, m]. Every value is above 0 (31 random
    bits, fine near 0, where winners are decided) and finite: a lone candidate must win its race.
    """
    noise = _mix32_(ids ^ keys[:, :1])
    noise += keys[:, 1:]
    noise = _mix32_(noise)
    noise &= 0x7FFFFFFF
    uniform = noise.to(torch.float32)
    uniform += 0.5
    uniform *= -(2.0**-31)
    uniform.clamp_(min=-LARGEST_UNIFORM)
    return uniform.log1p_().neg_()
