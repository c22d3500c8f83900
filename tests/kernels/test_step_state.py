"""Reading a step's inputs from the slots' tables, in the interpreter."""

import pytest
import torch
import triton_interpreter

triton_interpreter.enable()

from zlm.kernels import sampling_adjust, step_state  # noqa: E402

SLOTS, LENGTH, BLOCK = 7, 40, 16  # slot 6 is the dummy
DUMMY = SLOTS - 1


def tables(groups: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 90, (SLOTS, LENGTH), dtype=torch.int32, generator=generator)
    blocks = torch.randint(1, 50, (groups, SLOTS, 3), dtype=torch.int32, generator=generator)
    tokens[DUMMY] = 0
    blocks[:, DUMMY] = 0
    return tokens, blocks


STEPS = {
    "decodes": ([4, 0, 2, DUMMY], [16, 0, 39, 0], [1, 1, 1, 1]),
    "mixed": ([3, 1, 0, DUMMY], [31, 5, 0, 0], [1, 10, 15, 0]),
    "padding past the table": ([5, 2, DUMMY], [8, 30, 0], [1, 9, 150]),
}


@pytest.mark.parametrize("step", STEPS)
def test_prepare_reads_the_tables(step: str) -> None:
    tokens, blocks = tables()
    slots, starts, counts = (torch.tensor(c, dtype=torch.int32) for c in STEPS[step])
    query_starts = torch.zeros(len(counts) + 1, dtype=torch.int32)
    query_starts[1:] = counts.cumsum(0)
    total = int(query_starts[-1])
    ids, positions = (torch.full((total,), -1) for _ in range(2))
    seq_lens = torch.full((len(counts),), -1, dtype=torch.int32)
    mapping = torch.full((2, total), -1)
    step_state.prepare(
        slots, starts, query_starts, tokens, blocks, block_size=BLOCK, most=int(counts.max()),
        token_ids=ids, positions=positions, seq_lens=seq_lens, slot_mapping=mapping,
    )  # fmt: skip
    wanted = step_state.reference(slots, starts, query_starts, tokens, blocks, BLOCK)
    for got, expected in zip((ids, positions, seq_lens, mapping), wanted, strict=True):
        assert got.tolist() == expected.tolist()
    assert int(mapping[:, starts.shape[0] - 1 :].min()) >= 0
    padding = slots[torch.repeat_interleave(torch.arange(len(counts)), counts.long())] == DUMMY
    assert bool((mapping[:, padding] < BLOCK).all()), "padding goes to the null block"


def test_prepare_advances_the_starts_of_real_rows() -> None:
    tokens, blocks = tables()
    slots, starts = (torch.tensor(c, dtype=torch.int32) for c in ([4, 0, DUMMY], [16, 0, 0]))
    query_starts = torch.arange(4, dtype=torch.int32)
    for step in range(3):
        ids, positions = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
        seq_lens, mapping = torch.zeros(3, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int64)
        step_state.prepare(
            slots, starts, query_starts, tokens, blocks, block_size=BLOCK, most=1, advance=True,
            token_ids=ids, positions=positions, seq_lens=seq_lens, slot_mapping=mapping,
        )  # fmt: skip
        assert positions.tolist() == [16 + step, step, 0]
        assert ids.tolist() == [int(tokens[4, 16 + step]), int(tokens[0, step]), 0]


def test_gather_blocks_of_all_groups() -> None:
    _, blocks = tables()
    slots = torch.tensor([4, 0, 2, DUMMY], dtype=torch.int32)
    seq_lens = torch.tensor([17, 1, 40, 0], dtype=torch.int32)
    out = torch.full((2, 4, 3), -1, dtype=torch.int32)
    step_state.gather_blocks(slots, seq_lens, blocks, BLOCK, out=out)
    for row, (slot, length) in enumerate(zip(slots.tolist(), seq_lens.tolist(), strict=True)):
        needed = -(-length // BLOCK)
        for group in range(2):
            known = blocks[group, slot, :needed].tolist()
            assert out[group, row].tolist() == known + [0] * (3 - needed)


def test_write_blocks() -> None:
    _, blocks = tables()
    expected = blocks.clone()
    entries = [(0, 3, 1, 77), (1, 5, 2, 78), (1, 0, 0, 79)]
    places = []
    for group, slot, index, block in entries:
        expected[group, slot, index] = block
        places.append(((group * SLOTS + slot) * 3 + index, block))
    step_state.write_blocks(torch.tensor(places, dtype=torch.int32), blocks)
    assert torch.equal(blocks, expected)


def test_recount_agrees_with_counting_one_by_one() -> None:
    tokens, _ = tables()
    prompt, slots, lengths = (torch.tensor(c) for c in ([10, 1], [3, 0], [33, 9]))
    counts = torch.full((3, 90), 7, dtype=torch.int32)
    rows = torch.tensor([2, -1], dtype=torch.int32)
    sampling_adjust.recount(counts, rows, slots, prompt, lengths, tokens)
    assert bool((counts[:2] == 7).all())
    wanted = torch.zeros(90, dtype=torch.int32)
    wanted[tokens[3, :10].long()] = sampling_adjust.IN_PROMPT.value
    wanted += torch.bincount(tokens[3, 10:33].long(), minlength=90).int()
    assert counts[2].tolist() == wanted.tolist()
