"""The attention layer: merged projection, paged attention, output projection.

One product gives q, k and v of all heads side by side,

    [ q head 0 | q head 1 | ... | k head 0 | ... | v head 0 | ... ]      Hq + 2 Hkv heads of D

and all between it and the output product (norms of q and k, rotation, cache, attention) is one
operation of the backend on these rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zlm.config import ModelSpec, RopeSpec
from zlm.layers.norm import final_weight
from zlm.layers.parameters import Parameters
from zlm.layers.rotary import interleave
from zlm.ops.backend import Geometry, Norm
from zlm.ops.segments import SegmentAttention


@dataclass(frozen=True, slots=True)
class LayerStep:
    """A step as one layer's attention sees it; layers of one kind share all but the cache."""

    rotation: Tensor  # of the layer's rotary table, for the step's positions
    cache: Tensor  # the layer's
    work: Any  # the backend's plan of its KV group


def geometry(spec: ModelSpec) -> Geometry:
    """Return the heads of a layer of *spec*."""
    return Geometry(spec.num_heads, spec.num_kv_heads, spec.head_dim)


class Attention:
    """Parameters ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj``, and ``q_norm``, ``k_norm``."""

    def __init__(
        self, parameters: Parameters, spec: ModelSpec, rope: RopeSpec, *, wide: bool = False
    ) -> None:
        """*wide*: the result is float32."""
        ops = parameters.ops
        self.qkv = ops.linear(
            _merge(parameters, "weight", spec.head_dim, rope),
            _merge(parameters, "bias", spec.head_dim, rope) if spec.qkv_bias else None,
        )
        self.out = ops.linear(
            parameters["o_proj.weight"], parameters.optional("o_proj.bias"), wide=wide
        )
        q_norm, k_norm = (
            _head_norm(parameters, name, spec, rope) if spec.qk_norm else None
            for name in ("q_norm", "k_norm")
        )
        make = SegmentAttention if spec.bidirectional else ops.attention
        self.attention = make(
            geometry(spec),
            scale=spec.attention_scale or spec.head_dim**-0.5,
            softcap=spec.attention_softcap,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=spec.rms_norm_eps,
        )

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        """Return [T', H] for x [T', H]; keys and values of the step's tokens go to the cache."""
        return self.out(self.attention(self.qkv(x), step.rotation, step.cache, step.work))

    def add(self, x: Tensor, residual: Tensor, norm: Norm, step: LayerStep) -> Tensor:
        """Return *residual*, which is used up, plus the attention of the norm of x."""
        qkv = self.qkv(x, norm)
        return self.out.add(self.attention(qkv, step.rotation, step.cache, step.work), residual)


def _merge(parameters: Parameters, kind: str, head_dim: int, rope: RopeSpec) -> Tensor:
    """Return the weights or biases of q, k and v on top of each other."""
    q, k, v = (parameters[f"{name}.{kind}"] for name in ("q_proj", "k_proj", "v_proj"))
    return torch.cat((interleave(q, head_dim, rope), interleave(k, head_dim, rope), v))


def _head_norm(parameters: Parameters, name: str, spec: ModelSpec, rope: RopeSpec) -> Tensor:
    """Return the final weight of the norm of each head of q or k, float32 [D]."""
    weight = interleave(parameters[f"{name}.weight"].float(), spec.head_dim, rope)
    return final_weight(weight, spec)
