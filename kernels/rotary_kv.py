"""After the merged QKV product: norm of q and k, rotation, and the write to the paged cache.

One launch does it for all heads of a token. A row of the product is

    [ q head 0 | q head 1 | ... | k head 0 | ... | v head 0 | ... ]      Hq + 2 Hkv heads of D

q is normed, rotated and written to ``q_out`` (which may be the place it came from); k is normed,
rotated and stored in the cache; v is stored. The row itself does not change, unless q_out is in it.

Rotary pairs stand side by side in a head, as everywhere in zlm, and ``table`` holds cos + i sin of
a pair as two float32. Only the first ``2 * table.shape[1]`` dimensions turn. A ``table`` of float32
turns nothing: it has a number for each position that q alone is multiplied with. Arithmetic is
float32 from the load to the one rounding at the store. What would be stored as NaN or infinity is
stored as zero, since a masked NaN still poisons a softmax.

A cache of e4m3 takes k and v over their scales (``zlm.kernels.kv_fp8``); what is beyond its range
becomes its largest number.

Tokens whose slot lies in the null block (or is negative) are padding: their q is computed, nothing
of theirs is stored. The cache's layout is that of ``zlm.kernels.attention_decode``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from zlm.kernels.chain import begin
from zlm.kernels.kv_fp8 import FP8, code, rounded
from zlm.kernels.launch import cdiv, direct, power_of_two

# Heads of a program by padded head_dim, and its warps. A program takes about 1,024 elements: two
# 16-byte loads a thread of 64 to 128, and several programs a token when there is but one token.
HEADS: dict[str, dict[int, tuple[int, int]]] = {
    "NVIDIA H200": {32: (16, 4), 64: (16, 4), 128: (8, 4), 256: (4, 4), 512: (2, 4)},
}
DEFAULT_HEADS = {32: (16, 4), 64: (16, 4), 128: (8, 4), 256: (4, 4), 512: (2, 4)}


def reference(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    table: Tensor,
    cache: Tensor,
    *,
    num_heads: int,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    value_norm: bool = False,
    kv_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (q [T, Hq, D] float64, the cache after the write), of the same arguments as below."""
    num_kv_heads, block_size, head_dim = cache.shape[1], cache.shape[3], cache.shape[4]
    heads = qkv.double().unflatten(1, (-1, head_dim))
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), 1)
    if q_weight is not None and k_weight is not None:
        q, k = _normed(q, q_weight, eps), _normed(k, k_weight, eps)
    if value_norm:
        v = _normed(v, torch.ones(head_dim, device=v.device), eps)
    if table.is_complex():
        turns = table.to(torch.complex128)[positions].unsqueeze(1)
        q, k = _turned(q, turns), _turned(k, turns)
    else:
        q = q * table[positions, :1].double().unsqueeze(1)
    written = cache.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= block_size:
            block, offset = divmod(slot, block_size)
            both = torch.stack((k[token], v[token]), 1)
            if cache.dtype == FP8:
                finite = both.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
                each = 1.0 if kv_scales is None else kv_scales.t()[:, :, None]
                written[block, :, :, offset] = rounded(finite.float() / each)
            else:
                both = both.to(cache.dtype)
                written[block, :, :, offset] = both.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return q, written


def _normed(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    return heads / torch.sqrt(heads.square().mean(-1, keepdim=True) + eps) * weight.double()


def _turned(heads: Tensor, turns: Tensor) -> Tensor:
    width = 2 * turns.shape[-1]
    pairs = torch.view_as_complex(heads[..., :width].unflatten(-1, (-1, 2)).contiguous())
    return torch.cat((torch.view_as_real(pairs * turns).flatten(-2), heads[..., width:]), -1)


@triton.jit
def turned(
    b_x, b_turn, ROWS: tl.constexpr, TURNS: tl.constexpr, D_PAD: tl.constexpr, ROT: tl.constexpr
):
    """Return heads b_x [ROWS, D_PAD] times rows of a table, b_turn [TURNS, D_PAD], one or all.

    (a + ib)(cos + i sin) for the pairs that turn, times 1 for the rest.
    """
    b_cos, b_sin = tl.split(tl.reshape(b_turn, (TURNS, D_PAD // 2, 2)))
    b_cos = tl.where((tl.arange(0, D_PAD // 2) * 2 < ROT)[None, :], b_cos, 1.0)
    b_re, b_im = tl.split(tl.reshape(b_x, (ROWS, D_PAD // 2, 2)))
    b_new_re = b_re * b_cos - b_im * b_sin
    b_new_im = b_re * b_sin + b_im * b_cos
    return tl.reshape(tl.join(b_new_re, b_new_im), (ROWS, D_PAD))


@direct
@triton.jit
def _rotary_kv_kernel(
    p_qkv,
    p_positions,
    p_slots,
    p_table,
    p_cache,
    p_q_out,
    p_q_weight,
    p_k_weight,
    p_kv_scales,
    stride_qkv,
    stride_q_token,
    stride_q_head,
    stride_block,
    stride_head,
    stride_kv,
    num_positions,
    eps,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    ROT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    VALUE_NORM: tl.constexpr,
    FP8_CACHE: tl.constexpr,
    KV_SCALES: tl.constexpr,
    TURNS: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i_d = tl.arange(0, D_PAD)
    in_d = i_d < D
    if HAS_NORM:
        b_qw = tl.load(p_q_weight + i_d, mask=in_d, other=0.0)
        b_kw = b_qw
        if HKV > 0:
            b_kw = tl.load(p_k_weight + i_d, mask=in_d, other=0.0)
    if not EARLY:
        begin(PDL)
    i_slot = tl.load(p_slots + i_token, cache_modifier=".cg")
    i_position = tl.load(p_positions + i_token, cache_modifier=".cg")
    i_position = tl.minimum(tl.maximum(i_position, 0), num_positions - 1)
    if TURNS:
        b_turn = tl.load(p_table + i_position * ROT + i_d, mask=i_d < ROT, other=0.0)
    else:
        b_turn = tl.load(p_table + i_position)
    if EARLY:
        begin(PDL)
    is_q = i_h < HQ
    is_v = i_h >= HQ + HKV
    in_row = i_h < HQ + 2 * HKV
    mask = in_row[:, None] & in_d[None, :]
    p_x = p_qkv + i_token * stride_qkv + i_h[:, None] * D + i_d[None, :]
    b_x = tl.load(p_x, mask=mask, other=0.0).to(tl.float32)
    b_y = b_x
    if HAS_NORM:
        b_root = tl.rsqrt(tl.sum(b_x * b_x, 1) / D + eps)
        b_w = tl.where(is_q[:, None], b_qw[None, :], b_kw[None, :])
        b_y = b_x * b_root[:, None] * b_w
    if TURNS:
        b_y = turned(b_y, b_turn[None, :], HEADS, 1, D_PAD, ROT)
    else:
        b_y = tl.where(is_q[:, None], b_y * b_turn, b_y)
    b_v = b_x
    if VALUE_NORM:
        b_v = b_x * b_root[:, None]
    b_y = tl.where(is_v[:, None], b_v, b_y)

    p_q = p_q_out + i_token * stride_q_token + i_h[:, None] * stride_q_head + i_d[None, :]
    tl.store(p_q, b_y.to(p_q_out.dtype.element_ty), mask=is_q[:, None] & in_d[None, :])
    if i_slot >= BLOCK_SIZE:
        i_kv = tl.where(is_v, 1, 0)
        i_head = i_h - HQ - i_kv * HKV
        p_token = p_cache + (i_slot // BLOCK_SIZE) * stride_block + (i_slot % BLOCK_SIZE) * D
        p_kv = p_token + i_head[:, None] * stride_head + i_kv[:, None] * stride_kv + i_d[None, :]
        is_kv = (i_h >= HQ)[:, None]
        if FP8_CACHE:
            b_y = tl.where(tl.abs(b_y) < float("inf"), b_y, 0.0)
            if KV_SCALES:
                p_scale = p_kv_scales + i_kv * HKV + i_head
                b_y = b_y / tl.load(p_scale, mask=(i_h >= HQ) & in_row, other=1.0)[:, None]
            tl.store(p_kv, code(tl.minimum(tl.maximum(b_y, -448.0), 448.0)), mask=mask & is_kv)
        else:
            b_kv = b_y.to(p_cache.dtype.element_ty)
            b_kv = tl.where(tl.abs(b_kv.to(tl.float32)) < float("inf"), b_kv, 0.0)
            tl.store(p_kv, b_kv.to(p_cache.dtype.element_ty), mask=mask & is_kv)


def rotary_kv(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    table: Tensor,
    cache: Tensor,
    *,
    q_out: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    value_norm: bool = False,
    reads_only: bool = False,
    kv_scales: Tensor | None = None,
    early: bool = False,
    turned_queries: int | None = None,
    pdl: bool = False,
) -> None:
    """Norm, rotate and store the tokens of *qkv* [T, (Hq + 2 Hkv) * D].

    positions: int64 [T], clipped to the table's. slots: int64 [T], block * block_size + offset;
    a slot below block_size (null block, -1) stores nothing. table: complex64 [positions, rot / 2],
    contiguous, or float32 with rows of one number, expanded. cache: [num_blocks, Hkv, 2,
    block_size, D]. q_out: [T, Hq, D], rotated queries; may be ``qkv[:, :Hq * D].unflatten(1, (Hq,
    D))``. q_weight, k_weight: float32 [D], both or neither. value_norm: v is normed too, without a
    weight. reads_only: rows are queries alone, [T, Hq * D], and nothing is stored; there is no
    k_weight then. kv_scales: float32 [2, Hkv], of a cache of e4m3 (None: 1).
    turned_queries: without norms, the first so many tokens whose queries are rotated (None: all);
    whoever reads the others turns them himself. early, pdl: see ``zlm.kernels.chain``; *early* is
    of positions and slots.
    """
    if turned_queries is not None and turned_queries < q_out.shape[0]:
        assert q_weight is None and not value_norm and not reads_only
        first, keys = turned_queries, q_out.shape[1] * q_out.shape[2]
        parts = ((qkv[:first], slice(None, first), q_out[:first]),
                 (qkv[first:, keys:], slice(first, None), q_out[first:, :0]))  # fmt: skip
        for rows, where, q in parts:
            rotary_kv(
                rows, positions[where], slots[where], table, cache, q_out=q, eps=eps,
                kv_scales=kv_scales, early=early, pdl=pdl,
            )  # fmt: skip
        return
    tokens, num_heads, head_dim = q_out.shape
    num_kv_heads, block_size = 0 if reads_only else cache.shape[1], cache.shape[3]
    rotated = 2 * table.shape[1]
    assert qkv.shape == (tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    assert qkv.stride(1) == 1 and q_out.stride(2) == 1
    assert cache.shape[4] == head_dim and cache.stride(3) == head_dim and cache.stride(4) == 1
    turns = table.is_complex()
    assert rotated <= head_dim
    assert table.is_contiguous() if turns else table.stride() == (1, 0)
    assert (q_weight is None) == (k_weight is None) or (reads_only and k_weight is None)
    assert not value_norm or k_weight is not None
    if not tokens:
        return
    padded = max(power_of_two(head_dim), 32)
    heads, warps = _heads(qkv.device, padded)
    heads = min(heads, power_of_two(num_heads + 2 * num_kv_heads))
    angles = torch.view_as_real(table) if turns else table
    _rotary_kv_kernel[(tokens, cdiv(num_heads + 2 * num_kv_heads, heads))](
        qkv,
        positions,
        slots,
        angles,
        cache.view(torch.uint8) if cache.dtype == FP8 else cache,
        q_out,
        angles if q_weight is None else q_weight,
        angles if k_weight is None else k_weight,
        kv_scales,
        qkv.stride(0),
        q_out.stride(0),
        q_out.stride(1),
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        table.shape[0],
        eps,
        HQ=num_heads,
        HKV=num_kv_heads,
        D=head_dim,
        D_PAD=padded,
        ROT=rotated,
        BLOCK_SIZE=block_size,
        HEADS=heads,
        HAS_NORM=q_weight is not None,
        VALUE_NORM=value_norm,
        FP8_CACHE=cache.dtype == FP8,
        KV_SCALES=kv_scales is not None and cache.dtype == FP8 and not reads_only,
        TURNS=turns,
        EARLY=early and pdl,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )


def _heads(device: torch.device, padded: int) -> tuple[int, int]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return HEADS.get(name, DEFAULT_HEADS)[padded]
