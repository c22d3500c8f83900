"""Attention in both directions, over whole sequences: for encoders, which keep no keys and values.

Plain torch on any device. The rows of a step are whole sequences (they were never cut in chunks);
each row's tokens see one another and nothing else. Rows of one length are computed together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from zlm.ops.backend import Geometry


@dataclass(frozen=True, slots=True)
class Segments:
    """The rows of a step, by length."""

    by_length: list[tuple[int, Tensor]]  # a length L, and int64 [B, L]: its rows' tokens in T
    window: int  # tokens that a query sees on either side, itself included; 0: all
    biases: dict[int, Tensor] | None = None  # by length: [Hq, L, L] to be added to scaled q·k


def plan(lengths: Sequence[int], window: int, device: torch.device) -> Segments:
    """Return the plan of a step whose rows have *lengths* tokens, one after another."""
    starts: dict[int, list[int]] = {}
    first = 0
    for length in lengths:
        starts.setdefault(length, []).append(first)
        first += length
    groups = [
        (length, torch.tensor(rows, device=device)[:, None] + torch.arange(length, device=device))
        for length, rows in starts.items()
    ]
    return Segments(groups, window)


def attention(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, scale: float, softcap: float = 0.0
) -> Tensor:
    """Return attention [T', Hq, D] of q [T', Hq, D] over k and v [T', Hkv, D], row by row.

    Rows of padding, which no segment holds, get zeros. Biases go with neither window nor softcap.
    """
    out = torch.zeros_like(q)
    for length, places in segments.by_length:
        queries, keys, values = (x[places].transpose(1, 2) for x in (q, k, v))  # [B, H, L, D]
        if segments.biases is None:
            mask = _mask(length, segments.window, q.device)
        else:
            mask = segments.biases[length].to(q.dtype)
        if softcap:
            found = _capped(queries, keys, values, mask, scale, softcap)
        else:
            found = F.scaled_dot_product_attention(
                queries, keys, values, mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        out[places] = found.transpose(1, 2)
    return out


def _mask(length: int, window: int, device: torch.device) -> Tensor | None:
    """Return which keys each query sees, bool [L, L]; None: all."""
    if not window or window >= length:
        return None
    places = torch.arange(length, device=device)
    return (places[:, None] - places).abs() < window


def _capped(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float
) -> Tensor:
    repeats = queries.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(repeats, 1) for x in (keys, values))
    scores = queries.float() @ keys.float().transpose(-1, -2) * scale
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ values.float()).to(queries.dtype)


class SegmentAttention:
    """See ``zlm.ops.backend.PagedAttention``: the same place in a layer, without a cache.

    q_norm, k_norm: float32 [D] final weights, both or neither. kv_scales are of no use to it.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        scale: float,
        softcap: float,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        sinks: Tensor | None = None,
        value_norm: bool = False,
        reads_only: bool = False,
        kv_scales: Tensor | None = None,
    ) -> None:
        special = sinks is not None or value_norm or reads_only
        assert not special, "no model that sees both ways has these"
        self.geometry = geometry
        self.scale = scale
        self.softcap = softcap
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.eps = eps

    def __call__(self, qkv: Tensor, rotation: Tensor, cache: Tensor, work: Segments) -> Tensor:
        """Return [T', Hq * D]; rotation: complex64 [T', D / 2] of each row; *cache* is not used."""
        heads = self.geometry.num_heads, self.geometry.num_kv_heads, self.geometry.num_kv_heads
        q, k, v = qkv.view(qkv.shape[0], -1, self.geometry.head_dim).split(heads, 1)
        q = _turned(self._normed(q, self.q_norm), rotation).to(v.dtype)
        k = _turned(self._normed(k, self.k_norm), rotation).to(v.dtype)
        out = attention(q, k, v, work, scale=self.scale, softcap=self.softcap)
        return out.flatten(1)

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        wide = x.float()
        if weight is None:
            return wide
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * weight


def _turned(x: Tensor, rotation: Tensor) -> Tensor:
    """Return x float32 [T', H, D], whose pairs stand side by side, turned by *rotation*."""
    pairs = torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation[:, None]).flatten(-2)


def rotation(table: Tensor, positions: Tensor, num_rows: int) -> Tensor:
    """Return complex64 [T', D / 2] of *table* for int64 [T] positions; padding is not turned."""
    turns = table.index_select(0, positions)
    if num_rows == turns.shape[0]:
        return turns
    return torch.cat((turns, turns.new_ones(num_rows - turns.shape[0], turns.shape[1])))
