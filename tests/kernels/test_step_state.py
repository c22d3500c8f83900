"""Gathering a step's inputs from slot tables and putting its tokens back, in the interpreter."""

import torch
import triton_interpreter

triton_interpreter.enable()

from zlm.kernels import sampling_adjust, step_state  # noqa: E402

SLOTS, LENGTH, BLOCK = 7, 40, 16  # slot 6 is the dummy
DUMMY = SLOTS - 1


def tables() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 90, (SLOTS, LENGTH), dtype=torch.int32, generator=generator)
    blocks = torch.randint(1, 50, (SLOTS, 3), dtype=torch.int32, generator=generator)
    blocks[DUMMY] = 0
    return tokens, torch.tensor([1, 16, 17, 33, 40, 9, 1], dtype=torch.int32), blocks


def test_gather_of_a_decode_step() -> None:
    tokens, lengths, blocks = tables()
    slots = torch.tensor([4, 0, 2, 1, DUMMY, DUMMY], dtype=torch.int32)
    ids, positions, seq_lens, mapping = (torch.full((6,), -1) for _ in range(4))
    step_state.gather(slots, tokens, lengths, token_ids=ids, positions=positions, seq_lens=seq_lens)
    step_state.map_slots(slots, positions, blocks, BLOCK, slot_mapping=mapping)
    wanted = step_state.reference(slots, tokens, lengths, blocks, BLOCK)
    for got, expected in zip((ids, positions, seq_lens, mapping), wanted, strict=True):
        assert got.tolist() == expected.tolist()
    assert mapping[4:].tolist() == [0, 0]
    out = torch.full((6, 2), -1, dtype=torch.int32)
    step_state.gather_blocks(slots, seq_lens, blocks, BLOCK, out=out)
    for row, slot in enumerate(slots.tolist()):
        needed = min(2, -(-int(lengths[slot]) // BLOCK))
        assert out[row].tolist() == blocks[slot, :needed].tolist() + [0] * (2 - needed)


def test_gather_of_a_step_with_prefill() -> None:
    tokens, _, blocks = tables()
    slots, starts = torch.tensor([3, 1, 0]), torch.tensor([32, 5, 0])
    query_starts = torch.tensor([0, 1, 11, 26], dtype=torch.int32)
    ids, positions, mapping = (torch.full((26,), -1) for _ in range(3))
    token_slots = torch.full((26,), -1, dtype=torch.int32)
    seq_lens = torch.full((3,), -1, dtype=torch.int32)
    step_state.gather_ragged(
        slots, starts, query_starts, tokens,
        most=15, token_ids=ids, positions=positions, token_slots=token_slots, seq_lens=seq_lens,
    )  # fmt: skip
    step_state.map_slots(token_slots, positions, blocks, BLOCK, slot_mapping=mapping)
    assert seq_lens.tolist() == [33, 15, 15]
    for t in range(26):
        row = 0 if t < 1 else 1 if t < 11 else 2
        slot, position = int(slots[row]), int(starts[row]) + t - int(query_starts[row])
        assert (int(token_slots[t]), int(positions[t])) == (slot, position)
        assert int(ids[t]) == int(tokens[slot, position])
        assert int(mapping[t]) == int(blocks[slot, position // BLOCK]) * BLOCK + position % BLOCK


def test_scatter_appends_and_counts() -> None:
    """A full slot and dummies take nothing; only penalised slots count."""
    tokens, lengths, _ = tables()
    before, slots = tokens.clone(), torch.tensor([4, 3, 0, DUMMY, DUMMY], dtype=torch.int32)
    sampled = torch.tensor([11, 12, 13, 14, 15], dtype=torch.int32)
    count_rows = torch.tensor([1, -1, -1, -1, 0, -1, -1], dtype=torch.int32)
    counts = torch.zeros(2, 90, dtype=torch.int32)
    for _ in range(2):
        step_state.scatter(
            slots, sampled, tokens, lengths, dummy_slot=DUMMY, count_rows=count_rows, counts=counts
        )
    assert lengths.tolist() == [3, 16, 17, 35, 40, 9, 1]
    before[3, 33:35] = 12
    before[0, 1:3] = 13
    assert tokens.tolist() == before.tolist()
    assert counts.nonzero().tolist() == [[1, 13]] and int(counts[1, 13]) == 2


def test_recount_agrees_with_counting_step_by_step() -> None:
    tokens, lengths, _ = tables()
    prompt, slots = torch.tensor([10, 1]), torch.tensor([3, 0])
    counts = torch.full((3, 90), 7, dtype=torch.int32)
    rows = torch.tensor([2, -1], dtype=torch.int32)
    sampling_adjust.recount(counts, rows, slots, prompt, lengths[slots], tokens)
    assert bool((counts[:2] == 7).all())
    wanted = torch.zeros(90, dtype=torch.int32)
    wanted[tokens[3, :10].long()] = sampling_adjust.IN_PROMPT.value
    wanted += torch.bincount(tokens[3, 10:33].long(), minlength=90).int()
    assert counts[2].tolist() == wanted.tolist()
