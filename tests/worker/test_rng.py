"""The counter-based random numbers: reproducible, well mixed, exponential."""

import math

import pytest
import torch

from zlm.worker import rng

EVERY = torch.arange(50_000, dtype=torch.int32)[None]


def keys(seeds: list[int], positions: list[int]) -> torch.Tensor:
    return rng.row_keys(torch.tensor(seeds), torch.tensor(positions))


def splitmix64(state: int) -> int:
    mask = 2**64 - 1
    z = state & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def lowbias32(x: int) -> int:
    mask = 2**32 - 1
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & mask
    x = ((x ^ (x >> 15)) * 0x846CA68B) & mask
    return x ^ (x >> 16)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_hashes_are_the_published_ones(seed: int) -> None:
    """Python integers of any size and int64/int32 tensors that wrap give the same bits."""
    golden = 0x9E3779B97F4A7C15
    mixed = splitmix64(splitmix64(seed + golden) + 77 * golden)
    low, high = mixed & 0xFFFFFFFF, mixed >> 32
    assert [k % 2**32 for k in keys([seed], [77])[0].tolist()] == [low, high]
    words = [lowbias32((lowbias32(token ^ low) + high) & 0xFFFFFFFF) for token in (0, 5, 49_151)]
    ids = torch.tensor([[0, 5, 49_151]], dtype=torch.int32)
    got = rng.exponentials(keys([seed], [77]), ids)[0].tolist()
    expected = [-math.log1p(-((word & 0x7FFFFFFF) + 0.5) / 2**31) for word in words]
    assert got == pytest.approx(expected, rel=1e-5)


def test_variates_are_exponential() -> None:
    """Kolmogorov-Smirnov over tokens, over positions and over seeds; mean and variance too."""
    over_tokens = rng.exponentials(keys([3], [9]), EVERY).flatten()
    many = list(range(50_000))
    one = torch.tensor([[7]], dtype=torch.int32)
    over_positions = rng.exponentials(keys([3] * len(many), many), one).flatten()
    over_seeds = rng.exponentials(keys(many, [9] * len(many)), one).flatten()
    for sample in (over_tokens, over_positions, over_seeds):
        assert bool((sample > 0).all())
        ordered = sample.sort().values.double()
        uniform = 1 - torch.exp(-ordered)
        steps = torch.arange(1, len(sample) + 1, dtype=torch.float64) / len(sample)
        assert float((uniform - steps).abs().max()) < 1.63 / math.sqrt(len(sample))  # 1 % level
        assert float(sample.mean()) == pytest.approx(1.0, abs=0.02)
        assert float(sample.var()) == pytest.approx(1.0, abs=0.05)


def test_neighbouring_counters_are_unrelated() -> None:
    base = rng.exponentials(keys([5], [5]), EVERY)
    for other in (keys([6], [5]), keys([5], [6]), keys([5 + 2**32], [5]), keys([5 - 2**63], [5])):
        pair = torch.cat((base, rng.exponentials(other, EVERY)))
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.02


def test_a_variate_does_not_depend_on_the_batch() -> None:
    together = rng.exponentials(keys([1, 2, 3], [4, 5, 6]), EVERY)
    alone = rng.exponentials(keys([2], [5]), EVERY)
    torch.testing.assert_close(together[1], alone[0], rtol=1e-6, atol=0)
    some = torch.tensor([[17, 4, 40_000]], dtype=torch.int32)
    few = rng.exponentials(keys([2], [5]), some)[0]
    torch.testing.assert_close(few, alone[0, some[0].long()], rtol=1e-6, atol=0)


def test_the_largest_variate_is_finite() -> None:
    """This seed, position and id hash to a uniform that float32 rounds to 1."""
    largest = rng.exponentials(keys([49257534], [20]), torch.tensor([[299]], dtype=torch.int32))
    assert 16 < float(largest) < 17
