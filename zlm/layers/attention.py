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

from zlm.config import ModelSpec, RopeSpec, layer_heads
from zlm.layers.norm import final_weight
from zlm.layers.parameters import Parameters
from zlm.layers.rotary import interleave
from zlm.layers.whole_norm import WholeNorms
from zlm.ops.backend import Geometry, Norm
from zlm.ops.block_matrix import Weight, stack, take_rows
from zlm.ops.segments import SegmentAttention


@dataclass(frozen=True, slots=True)
class LayerStep:
    """A step as one layer's attention sees it; layers of one kind share all but the cache."""

    rotation: Any  # the backend's, of the layer's rotary table, for the step's positions
    cache: Tensor  # the layer's
    work: Any  # the backend's plan of its KV group
    picked: Tensor | None = None  # the tokens that go on from this layer's attention; None: all

    def kept(self, rows: Tensor) -> Tensor:
        """Return the rows, of [T', n], of tokens that go on; all of them are *rows* itself."""
        return rows if self.picked is None else rows.index_select(0, self.picked)


def geometry(spec: ModelSpec, index: int = 0) -> Geometry:
    """Return the heads of layer *index* of *spec*."""
    return Geometry(spec.num_heads, *layer_heads(spec, index))


class Attention:
    """Parameters ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj``, ``q_norm``, ``k_norm``, ``sinks``.

    In the place of the first three there may be ``qkv_proj``, all three of them on top of each
    other.
    """

    def __init__(
        self, parameters: Parameters, spec: ModelSpec, rope: RopeSpec, *, wide: bool = False
    ) -> None:
        """*wide*: the result is float32."""
        ops = parameters.ops
        self.qkv = ops.linear(
            _merged_weight(parameters, spec, rope),
            _merged_bias(parameters, spec, rope) if spec.qkv_bias else None,
        )
        out = ops.linear(
            parameters.product("o_proj.weight"), parameters.optional("o_proj.bias"), wide=wide
        )
        self.out = parameters.parallel.summed(out)
        q_norm, k_norm = (
            head_norm(parameters, name, spec, spec.head_dim, rope) if spec.qk_norm else None
            for name in ("q_norm", "k_norm")
        )
        if spec.qk_norm_plain and rope.partial_factor:
            q_norm = k_norm = torch.ones(spec.head_dim, device=ops.device)
        self.whole: WholeNorms | None = None
        if spec.qk_norm_whole and parameters.parallel.size > 1:
            assert q_norm is not None and k_norm is not None
            self.whole = WholeNorms(
                geometry(spec), q_norm, k_norm, spec.rms_norm_eps, parameters.parallel
            )
            q_norm = k_norm = None
        make = SegmentAttention if spec.bidirectional else ops.attention
        self.attention = make(
            geometry(spec),
            scale=spec.attention_scale or spec.head_dim**-0.5,
            softcap=spec.attention_softcap,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=spec.rms_norm_eps,
            sinks=parameters["sinks"].float() if spec.attention_sinks else None,
            kv_scales=parameters.cache_scales(spec.num_kv_heads),
        )

    def __call__(self, x: Tensor, step: LayerStep) -> Tensor:
        """Return [T', H] for x [T', H]; keys and values of the step's tokens go to the cache.

        The result has the rows that ``step`` keeps; so has that of ``add``.
        """
        return self.out(self._heads(self.qkv(x), step))

    def add(self, x: Tensor, residual: Tensor, norm: Norm, step: LayerStep) -> Tensor:
        """Return *residual*, which is used up, plus the attention of the norm of x."""
        return self.out.add(self._heads(self.qkv(x, norm), step), step.kept(residual))

    def _heads(self, qkv: Tensor, step: LayerStep) -> Tensor:
        if self.whole is not None:
            qkv = self.whole.apply(qkv)
        return step.kept(self.attention(qkv, step.rotation, step.cache, step.work))


def _merged_weight(parameters: Parameters, spec: ModelSpec, rope: RopeSpec) -> Weight:
    """Return the weights of q, k and v on top of each other."""
    if not spec.fused_products:
        q, k, v = (parameters.product(f"{name}.weight") for name in ("q_proj", "k_proj", "v_proj"))
        return merged(q, k, v, spec.head_dim, rope, parameters.ops.dtype)
    both = parameters.product("qkv_proj.weight")
    q, k, v = (take_rows(both, rows) for rows in torch.arange(both.shape[0]).split(_rows(spec)))
    return merged(q, k, v, spec.head_dim, rope, parameters.ops.dtype)


def _merged_bias(parameters: Parameters, spec: ModelSpec, rope: RopeSpec) -> Tensor:
    """Return the biases of q, k and v on top of each other."""
    if spec.fused_products:
        q, k, v = parameters["qkv_proj.bias"].split(_rows(spec))
    else:
        q, k, v = (parameters[f"{name}.bias"] for name in ("q_proj", "k_proj", "v_proj"))
    head_dim = spec.head_dim
    return torch.cat((interleave(q, head_dim, rope), interleave(k, head_dim, rope), v))


def _rows(spec: ModelSpec) -> tuple[int, int, int]:
    """Return the rows of q, k and v."""
    kv = spec.num_kv_heads * spec.head_dim
    return spec.num_heads * spec.head_dim, kv, kv


def merged(
    q: Weight, k: Weight, v: Weight, head_dim: int, rope: RopeSpec, dtype: torch.dtype
) -> Weight:
    """Return the rows of q, k and v on top of each other, with rotary pairs side by side.

    Unless all are quantized alike the result is of *dtype*.
    """
    paired = (
        take_rows(weight, interleave(torch.arange(weight.shape[0]), head_dim, rope))
        for weight in (q, k)
    )
    return stack([*paired, v], dtype)


def head_norm(
    parameters: Parameters, name: str, spec: ModelSpec, head_dim: int, rope: RopeSpec
) -> Tensor:
    """Return the final weight of the norm of q or k, float32: [D] of each head, or of all."""
    weight = interleave(parameters[f"{name}.weight"].float(), head_dim, rope)
    return final_weight(weight, spec)
