"""The attention layer: merged projection, norms of q and k, rotation, cache, attention, output.

One product gives q, k and v of all heads side by side,

    [ q head 0 | q head 1 | ... | k head 0 | ... | v head 0 | ... ]      Hq + 2 Hkv heads of D

so that norm and rotation take q and k as one tensor of heads, and keys with values go to the cache
in one write. Nothing of it is copied on the way.
"""

import torch
from torch import Tensor

from zlm.config import ModelSpec, RopeSpec
from zlm.layers.parameters import Parameters
from zlm.layers.rotary import interleave
from zlm.ops import attention, kv_cache, linear, rotary
from zlm.ops.attention import AttentionPlan
from zlm.ops.norm import RMSNorm


class Attention:
    """Parameters ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj``, and ``q_norm``, ``k_norm``."""

    def __init__(self, parameters: Parameters, spec: ModelSpec, rope: RopeSpec) -> None:
        self.num_heads = spec.num_heads
        self.num_kv_heads = spec.num_kv_heads
        self.head_dim = spec.head_dim
        self.scale = spec.attention_scale or spec.head_dim**-0.5
        self.softcap = spec.attention_softcap
        self.qkv = linear.pack(
            _merge(parameters, "weight", spec.head_dim, rope),
            _merge(parameters, "bias", spec.head_dim, rope) if spec.qkv_bias else None,
        )
        self.out = linear.pack(parameters["o_proj.weight"], parameters.optional("o_proj.bias"))
        self.qk_norm = _qk_norm(parameters, spec, rope) if spec.qk_norm else None

    def rotation(self, table: Tensor, positions: Tensor, num_rows: int) -> Tensor:
        """Return what this layer's QKV rows are multiplied with; layers with one table share it.

        table: see ``layers.rotary``; positions int64 [T]; num_rows: T' with padding.
        """
        num_rotated = self.num_heads + self.num_kv_heads
        return rotary.factors(table, positions, num_rows, num_rotated, self.num_kv_heads)

    def __call__(
        self, x: Tensor, rotation: Tensor, cache: Tensor, slots: Tensor, work: AttentionPlan
    ) -> Tensor:
        """Return [T', H] for x [T', H]; keys and values of the first T tokens go to *cache*.

        rotation: of ``rotation``; slots: int64 [T]; T' may exceed T by padding rows.
        """
        return self.out(self._heads(x, rotation, cache, slots, work))

    def add(
        self,
        x: Tensor,
        residual: Tensor,
        rotation: Tensor,
        cache: Tensor,
        slots: Tensor,
        work: AttentionPlan,
    ) -> Tensor:
        """Return *residual* plus the attention of x."""
        return self.out.add(self._heads(x, rotation, cache, slots, work), residual)

    def _heads(
        self, x: Tensor, rotation: Tensor, cache: Tensor, slots: Tensor, work: AttentionPlan
    ) -> Tensor:
        """Return what the heads give, [T', Hq * D]."""
        qkv = self.qkv(x)
        if self.qk_norm is not None:
            heads = qkv.view(qkv.shape[0], -1, self.head_dim)
            self.qk_norm.apply_(heads[:, : self.num_heads + self.num_kv_heads])
        qkv = rotary.rotate(qkv, rotation)
        kv_cache.write(cache, qkv[:, self.num_heads * self.head_dim :], slots)
        return attention.attention(qkv, cache, work, scale=self.scale, softcap=self.softcap)


def _merge(parameters: Parameters, kind: str, head_dim: int, rope: RopeSpec) -> Tensor:
    """Return the weights or biases of q, k and v on top of each other."""
    q, k, v = (parameters[f"{name}.{kind}"] for name in ("q_proj", "k_proj", "v_proj"))
    return torch.cat((interleave(q, head_dim, rope), interleave(k, head_dim, rope), v))


def _qk_norm(parameters: Parameters, spec: ModelSpec, rope: RopeSpec) -> RMSNorm:
    """Return one norm for the heads of q and k, [Hq + Hkv, D]."""
    weights = [
        interleave(parameters[f"{name}.weight"].float(), spec.head_dim, rope).expand(heads, -1)
        for name, heads in (("q_norm", spec.num_heads), ("k_norm", spec.num_kv_heads))
    ]
    weight = torch.cat(weights)
    return RMSNorm(1.0 + weight if spec.norm_plus_one else weight, spec.rms_norm_eps)
