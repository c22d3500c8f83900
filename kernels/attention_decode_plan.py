"""How decode attention shares out its work: tuned settings, buffers, and the plan of a step.

The theory is told in ``zlm.kernels.attention_decode``: all tiles of all rows and KV heads stand in
one line, and each program takes an equal share of it. The plan, made on the device from the lengths
alone, says where each program's share begins. It is int32:

    tiles of a share, tiles of the line, rows of length 0, 0
    for each program: its row, where the row begins and ends in the line, the row's length
    where each row begins in the line, and the line's end                         [rows + 1]

A record is all that a program needs for its first piece, in one load.

A share is the line's tiles over the programs, but no less than ``DecodeConfig.least`` (or than the
longest row has, if fewer), nor so small that one (row, head) falls into more than about
``MOST_PIECE_BYTES`` of partial results: one program adds them up, and what it can read in time is
less than what the others read side by side.

Few rows and many want different settings: with few the way of one program takes the time, with many
the memory does. The rows of a launch, those of padding with them, are known where it is captured,
so plan and kernel choose by them alike.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from zlm.kernels.chain import begin
from zlm.kernels.launch import cdiv, direct, power_of_two, processors_of

PLAN_HEADER, PLAN_RECORD = 4, 4
PLAN_PROGRAMS = 8  # records made by one program of the plan kernel
PLAN_ROWS = 256  # rows it looks at at once
MOST_PIECE_BYTES = 2**18  # some 3 µs of reading for one program
FEW_ROWS = 8


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How the decode kernel runs on a card."""

    tile: int  # tokens
    warps: int
    stages: int
    programs: int  # that run on a multiprocessor at once
    least: int = 1  # tiles of a share
    spare: int = 0  # tiles a share may have beyond an equal one for no (row, head) to be cut

    @property
    def registers(self) -> int:
        """What a thread may have for all programs of a multiprocessor to run at once."""
        return min(65_536 // (self.programs * self.warps * 32) // 8 * 8, 255)


FewAndMany = tuple[DecodeConfig, DecodeConfig]  # for at most FEW_ROWS rows, for more

# By padded head_dim, for a cache of 2-byte elements; those of 4 take half the tile. Measured on an
# H200 by ``bench/attention.py``, but for 32. With n stages keys and values come n - 1 tiles ahead
# and have as many buffers (seen in the compiled code of Triton 3.6): 64 KiB and more are under way
# on a multiprocessor, 3 times what 4.2 TB/s need at 700 ns of latency.
CONFIGS: dict[str, dict[int, FewAndMany]] = {
    "NVIDIA H200": {
        32: (DecodeConfig(64, 4, 3, 4), DecodeConfig(64, 4, 3, 4)),
        64: (DecodeConfig(64, 4, 3, 4), DecodeConfig(32, 2, 3, 8, spare=13)),
        128: (DecodeConfig(64, 4, 4, 2, least=2, spare=8), DecodeConfig(32, 4, 3, 4)),
        256: (DecodeConfig(32, 4, 3, 2, least=3), DecodeConfig(32, 4, 3, 2)),
        512: (DecodeConfig(16, 4, 2, 2), DecodeConfig(16, 4, 2, 2)),  # not measured
    },
}
# For a cache of e4m3.
FP8_CONFIGS: dict[str, dict[int, FewAndMany]] = {
    "NVIDIA H200": {
        32: (DecodeConfig(64, 4, 3, 4), DecodeConfig(64, 4, 3, 4)),
        64: (DecodeConfig(64, 4, 3, 4), DecodeConfig(64, 2, 3, 8)),
        128: (DecodeConfig(128, 4, 3, 2), DecodeConfig(64, 4, 3, 4)),
        256: (DecodeConfig(32, 4, 3, 3, least=3), DecodeConfig(64, 8, 3, 2, least=2)),
        512: (DecodeConfig(16, 4, 2, 2), DecodeConfig(16, 4, 2, 2)),
    },
}
DEFAULT_CONFIGS: dict[int, FewAndMany] = {
    32: (DecodeConfig(64, 4, 3, 2), DecodeConfig(64, 4, 3, 2)),
    64: (DecodeConfig(64, 4, 3, 2), DecodeConfig(64, 4, 3, 2)),
    128: (DecodeConfig(32, 4, 3, 2), DecodeConfig(32, 4, 3, 2)),
    256: (DecodeConfig(16, 4, 3, 2), DecodeConfig(16, 4, 3, 2)),
    512: (DecodeConfig(16, 4, 1, 1), DecodeConfig(16, 4, 1, 1)),
}
NO_DOT_TILE = 16  # its broadcast products hold G * TILE * D numbers in registers


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Buffers of decode attention for one geometry; made once, shared by all layers and steps.

    One launch at a time may use it (one stream). Plan and kernel must be given the same one. They
    are large enough for either setting.
    """

    partial: Tensor  # float32 [2 * programs, G, D]: attention of a piece
    partial_lse: Tensor  # float32 [2 * programs, G]: log2 of a piece's softmax sum
    arrivals: Tensor  # int32 [programs]: pieces that are done; 0 between launches
    use_dot: bool
    configs: FewAndMany
    processors: int

    def config(self, rows: int) -> DecodeConfig:
        """Return the setting of a launch over *rows* rows."""
        return self.configs[rows > FEW_ROWS]

    def programs(self, rows: int) -> int:
        """Return the programs of a launch over *rows* rows."""
        return self.processors * self.config(rows).programs


@triton.jit
def first_seen(i_position, WINDOW: tl.constexpr):
    """Return the first key that queries at *i_position* see.

    WINDOW: tokens, 0: all; -n: those of chunks of n.
    """
    if WINDOW < 0:
        i_key = tl.maximum(i_position, 0) // -WINDOW * -WINDOW
    elif WINDOW > 0:
        i_key = tl.maximum(i_position + 1 - WINDOW, 0)
    else:
        i_key = i_position * 0
    return i_key


@triton.jit
def tiles(i_len, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Return (first tile, number of tiles) of rows of *i_len* tokens."""
    i_first = first_seen(i_len - 1, WINDOW) // TILE
    return i_first, tl.where(i_len > 0, (i_len + TILE - 1) // TILE - i_first, 0)


@triton.jit
def piece(i_unit, i_row_start, i_len, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Return what begins at *i_unit* of the line: the KV head, which of its tiles, how many it has,
    and the number of the tile in the sequence."""
    i_first, n_tiles = tiles(i_len, TILE, WINDOW)
    n_tiles = tl.maximum(n_tiles, 1)
    i_within = (i_unit - i_row_start) % n_tiles
    return (i_unit - i_row_start) // n_tiles, i_within, n_tiles, i_first + i_within


@direct
@triton.jit(
    do_not_specialize=[
        "p_lens",
        "p_plan",
        "num_rows",
        "num_programs",
        "least",
        "most_pieces",
        "spare",
    ]
)
def _plan_kernel(
    p_lens,
    p_plan,
    num_rows,
    num_programs,
    least,
    most_pieces,
    spare,
    HKV: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    HEADER: tl.constexpr,
    ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the share's size, PROGRAMS records, and (program 0) where each row begins."""
    begin(PDL)
    i_program = tl.program_id(0) * PROGRAMS + tl.arange(0, PROGRAMS)
    p_starts = p_plan + HEADER + num_programs * 4
    total = 0
    longest = 0
    n_empty = 0
    for i_base in range(0, num_rows, ROWS):
        i_row = i_base + tl.arange(0, ROWS)
        i_len = tl.load(p_lens + i_row, mask=i_row < num_rows, other=1)
        _, n_tiles = tiles(i_len, TILE, WINDOW)
        n_tiles = tl.where(i_row < num_rows, n_tiles, 0)
        b_end = total + tl.cumsum(n_tiles * HKV, 0)
        if tl.program_id(0) == 0:
            tl.store(p_starts + 1 + i_row, b_end, mask=i_row < num_rows)
        total += tl.sum(n_tiles, 0) * HKV
        longest = tl.maximum(longest, tl.max(n_tiles, 0))
        n_empty += tl.sum((i_len <= 0).to(tl.int32), 0)
    equal = (total + num_programs - 1) // num_programs
    share = tl.maximum(equal, tl.minimum(least, tl.maximum(longest, 1)))
    share = tl.maximum(share, (longest + most_pieces - 1) // most_pieces)
    if equal + spare >= longest:
        share = tl.maximum(share, longest)
    if tl.program_id(0) == 0:
        tl.store(p_starts, 0)
        tl.store(p_plan, share)
        tl.store(p_plan + 1, total)
        tl.store(p_plan + 2, n_empty)

    # A program's row is the last that begins at or before its share and has tiles.
    i_begin = i_program * share
    b_row = tl.zeros([PROGRAMS], tl.int32)
    b_start = tl.zeros([PROGRAMS], tl.int32)
    base = 0
    for i_base in range(0, num_rows, ROWS):
        i_row = i_base + tl.arange(0, ROWS)
        i_len = tl.load(p_lens + i_row, mask=i_row < num_rows, other=0)
        _, n_tiles = tiles(i_len, TILE, WINDOW)
        b_end = base + tl.cumsum(n_tiles * HKV, 0)
        before = (b_end[None, :] <= i_begin[:, None]) & (i_row < num_rows)[None, :]
        b_row += tl.sum(before.to(tl.int32), 1)
        b_start = tl.maximum(b_start, tl.max(tl.where(before, b_end[None, :], 0), 1))
        base += tl.sum(n_tiles, 0) * HKV
    works = (i_begin < total) & (i_program < num_programs)
    i_len = tl.load(p_lens + b_row, mask=works, other=0)
    _, n_tiles = tiles(i_len, TILE, WINDOW)
    p_record = p_plan + HEADER + i_program * 4
    exists = i_program < num_programs
    tl.store(p_record, b_row, mask=exists)
    tl.store(p_record + 1, b_start, mask=exists)
    tl.store(p_record + 2, tl.where(works, b_start + n_tiles * HKV, b_start), mask=exists)
    tl.store(p_record + 3, i_len, mask=exists)


def allocate_workspace(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    cache_dtype: torch.dtype | None = None,
    use_dot: bool | None = None,
    processors: int | None = None,
    configs: FewAndMany | None = None,
) -> DecodeWorkspace:
    """Return buffers for any number of rows with q of *dtype*, and a cache of *cache_dtype*.

    *cache_dtype* None is that of q. *use_dot*, *processors* (None: what the device has) and
    *configs* (None: the tuned ones) can be set for tests and benches.
    """
    few, many = configs or settings(device, head_dim, cache_dtype or dtype)
    if use_dot is None:
        use_dot = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
    if not use_dot:
        few = many = DecodeConfig(NO_DOT_TILE, warps=8, stages=1, programs=2)
    if processors is None:
        processors = processors_of(device)
    programs = processors * max(few.programs, many.programs)
    group = num_heads // num_kv_heads
    return DecodeWorkspace(
        partial=torch.empty((2 * programs, group, head_dim), dtype=torch.float32, device=device),
        partial_lse=torch.empty((2 * programs, group), dtype=torch.float32, device=device),
        arrivals=torch.zeros(programs, dtype=torch.int32, device=device),
        use_dot=use_dot,
        configs=(few, many),
        processors=processors,
    )


def plan_size(max_rows: int, workspace: DecodeWorkspace) -> int:
    """Return the int32 elements of a plan for at most *max_rows* rows."""
    return PLAN_HEADER + PLAN_RECORD * workspace.arrivals.shape[0] + max_rows + 1


def plan_decode(
    seq_lens: Tensor,
    *,
    out: Tensor,
    workspace: DecodeWorkspace,
    num_kv_heads: int,
    window: int = 0,
    pdl: bool = False,
) -> None:
    """Write to *out* the plan of rows *seq_lens* (int32 [R]).

    *out* is int32 and has ``plan_size`` elements or more.

    The plan holds for every layer with this window until the lengths change. *pdl*: see
    ``zlm.kernels.chain``.
    """
    rows = seq_lens.shape[0]
    assert out.numel() >= plan_size(rows, workspace) and out.dtype == torch.int32
    piece_bytes = workspace.partial[0].nbytes
    config, programs = workspace.config(rows), workspace.programs(rows)
    _plan_kernel[(cdiv(programs, PLAN_PROGRAMS),)](
        seq_lens,
        out,
        rows,
        programs,
        config.least,
        max(MOST_PIECE_BYTES // piece_bytes, 1),
        config.spare,
        HKV=num_kv_heads,
        TILE=config.tile,
        WINDOW=window,
        HEADER=PLAN_HEADER,
        ROWS=PLAN_ROWS,
        PROGRAMS=PLAN_PROGRAMS,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def settings(device: torch.device, head_dim: int, dtype: torch.dtype) -> FewAndMany:
    """Return the tuned settings for a cache of *dtype*."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    tables = FP8_CONFIGS if dtype.itemsize == 1 else CONFIGS
    few, many = tables.get(name, DEFAULT_CONFIGS)[max(power_of_two(head_dim), 32)]
    if dtype.itemsize <= 2:
        return few, many
    halves = [replace(config, tile=max(config.tile // 2, 16)) for config in (few, many)]
    return halves[0], halves[1]
