"""How decode attention shares out its work: tuned settings, buffers, and the plan of a step.

The theory is told in ``zlm.kernels.attention_decode``: all tiles of all rows and KV heads stand in
one line, and each program takes an equal share of it. The plan, made on the device from the lengths
alone, says where each program's share begins. It is int32:

    units of a share, units of the line, 0, 0
    for each program: its row, where the row begins and ends in the line, the row's length
    where each row begins in the line, and the line's end                         [rows + 1]

A record is all that a program needs for its first piece, in one load.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

PLAN_HEADER, PLAN_RECORD = 4, 4
PLAN_PROGRAMS = 8  # records made by one program of the plan kernel
PLAN_ROWS = 256  # rows it looks at at once


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How a decode kernel runs: tokens of a tile, warps, stages, programs on a multiprocessor."""

    tile: int
    warps: int
    stages: int
    programs: int


# By padded head_dim, for elements of 2 bytes; those of 4 take half the tile. A key's address needs
# its block from the table first, and each of the two loads takes half of the stages: with 5, keys
# and values come two tiles ahead and have 2 buffers (seen in the compiled code of Triton 3.6), with
# 3 or 4 nothing overlaps. A tile of 16 to 32 KiB ahead on each of 2 to 4 programs is 64 to 96 KiB
# in flight on a multiprocessor, 3 to 4 times what 4.2 TB/s need at 700 ns of latency. Shared memory
# of a program: 37 KiB at D = 64, 71 at 128, 74 at 256.
CONFIGS: dict[str, dict[int, DecodeConfig]] = {
    "NVIDIA H200": {
        32: DecodeConfig(64, 4, 5, 4),
        64: DecodeConfig(64, 4, 5, 4),
        128: DecodeConfig(64, 4, 5, 3),
        256: DecodeConfig(32, 4, 5, 2),  # 193 registers a thread
    },
}
DEFAULT_CONFIGS = {
    32: DecodeConfig(64, 4, 5, 2),
    64: DecodeConfig(64, 4, 5, 2),
    128: DecodeConfig(32, 4, 5, 2),
    256: DecodeConfig(16, 4, 5, 2),
}
NO_DOT_TILE = 16  # its broadcast products hold G * TILE * D numbers in registers


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Buffers of decode attention for one geometry; made once, shared by all layers and steps.

    One launch at a time may use it (one stream). Plan and kernels must be given the same one.
    """

    partial: Tensor  # float32 [places, G, D]: attention of a piece
    partial_lse: Tensor  # float32 [places, G]: log2 of a piece's softmax sum
    programs: int
    fixed_splits: int  # 0: shares of the line
    use_dot: bool
    config: DecodeConfig


@triton.jit
def units(i_len, TILE: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr):
    """Return (first tile, tiles, tiles of a unit, units) of rows of *i_len* tokens.

    A unit is what the line is made of: a tile, or with SPLITS a fixed part of a row.
    """
    i_first = i_len * 0
    if WINDOW > 0:
        i_first = tl.maximum(i_len - WINDOW, 0) // TILE
    n_tiles = tl.where(i_len > 0, (i_len + TILE - 1) // TILE - i_first, 0)
    n_each = n_tiles * 0 + 1
    n_units = n_tiles
    if SPLITS > 0:
        n_each = tl.maximum((n_tiles + SPLITS - 1) // SPLITS, 1)
        n_units = (n_tiles + n_each - 1) // n_each
    return i_first, n_tiles, n_each, n_units


@triton.jit(do_not_specialize=["p_lens", "p_plan", "num_rows", "num_programs"])
def _plan_kernel(
    p_lens,
    p_plan,
    num_rows,
    num_programs,
    HKV: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Write the share's size, PROGRAMS records, and (program 0) where each row begins."""
    i_program = tl.program_id(0) * PROGRAMS + tl.arange(0, PROGRAMS)
    p_starts = p_plan + 4 + num_programs * 4
    total = 0
    for i_base in range(0, num_rows, ROWS):
        i_row = i_base + tl.arange(0, ROWS)
        i_len = tl.load(p_lens + i_row, mask=i_row < num_rows, other=0)
        _, _, _, n_units = units(i_len, TILE, WINDOW, SPLITS)
        b_end = total + tl.cumsum(n_units * HKV, 0)
        if tl.program_id(0) == 0:
            tl.store(p_starts + 1 + i_row, b_end, mask=i_row < num_rows)
        total += tl.sum(n_units, 0) * HKV
    share = tl.maximum((total + num_programs - 1) // num_programs, 1)
    if tl.program_id(0) == 0:
        tl.store(p_starts, 0)
        tl.store(p_plan, share)
        tl.store(p_plan + 1, total)

    # A program's row is the last that begins at or before its share and has units.
    i_begin = i_program * share
    b_row = tl.zeros([PROGRAMS], tl.int32)
    b_start = tl.zeros([PROGRAMS], tl.int32)
    base = 0
    for i_base in range(0, num_rows, ROWS):
        i_row = i_base + tl.arange(0, ROWS)
        i_len = tl.load(p_lens + i_row, mask=i_row < num_rows, other=0)
        _, _, _, n_units = units(i_len, TILE, WINDOW, SPLITS)
        b_end = base + tl.cumsum(n_units * HKV, 0)
        before = (b_end[None, :] <= i_begin[:, None]) & (i_row < num_rows)[None, :]
        b_row += tl.sum(before.to(tl.int32), 1)
        b_start = tl.maximum(b_start, tl.max(tl.where(before, b_end[None, :], 0), 1))
        base += tl.sum(n_units, 0) * HKV
    works = (i_begin < total) & (i_program < num_programs)
    i_len = tl.load(p_lens + b_row, mask=works, other=0)
    _, _, _, n_units = units(i_len, TILE, WINDOW, SPLITS)
    p_record = p_plan + 4 + i_program * 4
    exists = i_program < num_programs
    tl.store(p_record, b_row, mask=exists)
    tl.store(p_record + 1, b_start, mask=exists)
    tl.store(p_record + 2, tl.where(works, b_start + n_units * HKV, b_start), mask=exists)
    tl.store(p_record + 3, i_len, mask=exists)


def allocate_workspace(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_rows: int,
    fixed_splits: int = 0,
    use_dot: bool | None = None,
    programs: int | None = None,
) -> DecodeWorkspace:
    """Return buffers for at most *max_rows* rows with q and cache of *dtype*.

    *use_dot* and *programs* (None: what the device has) can be set for tests.
    """
    config = _config(device, head_dim, dtype)
    if use_dot is None:
        use_dot = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
    if not use_dot:
        config = DecodeConfig(NO_DOT_TILE, 8, 1, config.programs)
    if programs is None:
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        programs = processors * config.programs
    group = num_heads // num_kv_heads
    places = max_rows * num_kv_heads * fixed_splits if fixed_splits else 2 * programs
    return DecodeWorkspace(
        partial=torch.empty((places, group, head_dim), dtype=torch.float32, device=device),
        partial_lse=torch.empty((places, group), dtype=torch.float32, device=device),
        programs=programs,
        fixed_splits=fixed_splits,
        use_dot=use_dot,
        config=config,
    )


def plan_size(max_rows: int, workspace: DecodeWorkspace) -> int:
    """Return the int32 elements of a plan for at most *max_rows* rows."""
    return PLAN_HEADER + PLAN_RECORD * workspace.programs + max_rows + 1


def plan_decode(
    seq_lens: Tensor, *, out: Tensor, workspace: DecodeWorkspace, num_kv_heads: int, window: int = 0
) -> None:
    """Write to *out* the plan of rows *seq_lens* (int32 [R]).

    *out* is int32 and has ``plan_size`` elements or more.

    The plan holds for every layer with this window until the lengths change.
    """
    assert out.numel() >= plan_size(seq_lens.shape[0], workspace) and out.dtype == torch.int32
    _plan_kernel[(triton.cdiv(workspace.programs, PLAN_PROGRAMS),)](
        seq_lens,
        out,
        seq_lens.shape[0],
        workspace.programs,
        HKV=num_kv_heads,
        TILE=workspace.config.tile,
        WINDOW=window,
        SPLITS=workspace.fixed_splits,
        ROWS=PLAN_ROWS,
        PROGRAMS=PLAN_PROGRAMS,
        num_warps=4,
    )


def _config(device: torch.device, head_dim: int, dtype: torch.dtype) -> DecodeConfig:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    config = CONFIGS.get(name, DEFAULT_CONFIGS)[max(triton.next_power_of_2(head_dim), 32)]
    if dtype.itemsize == 2:
        return config
    return DecodeConfig(max(config.tile // 2, 16), config.warps, config.stages, config.programs)
