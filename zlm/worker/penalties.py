"""What changes logits before sampling: penalties, biases, allowed ids, bad words, early ends.

Every function changes ``logits`` (float32 [n, V]) in place, for the rows of its own entries only,
in one batched operation; rows that ask for nothing are not touched and cost nothing. Ragged client
lists stand one after another in flat columns (see ``zlm.worker.sampling_slots``). Knows of the
token table that row ``slots[r]`` holds row r's tokens, prompt first; nothing of requests.

A mask is an addition of -inf at flat positions, so that nothing has to wait for a count of them.
"""

import torch
from torch import Tensor

from zlm.worker.sampling_table import BadWords, Entries, OutputPenalty, RepetitionPenalty

LARGEST = torch.finfo(torch.float32).max


def _flat(logits: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """Positions in ``logits.view(-1)`` of token *ids* ([k, m] or [k]) in *rows* ([k])."""
    vocab_size = logits.shape[1]
    return (rows * vocab_size).view(-1, *([1] * (ids.dim() - 1))) + ids


def repetition(
    logits: Tensor, penalty: RepetitionPenalty, tokens: Tensor, slots: Tensor, lengths: Tensor
) -> None:
    """Penalise every token of prompt and output: positive logits divided, negative multiplied.

    ``lengths`` int64 [n] is how many tokens each row has. A token that stands many times is
    penalised once: all its places write the same value. What is infinite stays so.
    """
    rows = penalty.rows
    known = lengths[rows]
    width = int(known.max())
    seen = tokens[:, :width].index_select(0, slots[rows]).long()
    places = torch.arange(width, device=seen.device)
    seen = torch.where(places < known[:, None], seen, seen[:, :1])  # padding repeats a seen token
    flat, where = logits.view(-1), _flat(logits, rows, seen)
    value, factor = flat[where], penalty.factor[:, None]
    smaller = (value * factor).clamp(min=-LARGEST)
    penalised = torch.where(value > 0, (value / factor).clamp(max=LARGEST), smaller)
    flat[where] = torch.where(value.isinf(), value, penalised)


def output_penalties(
    logits: Tensor, penalty: OutputPenalty, tokens: Tensor, slots: Tensor, lengths: Tensor
) -> None:
    """Subtract presence once and frequency per occurrence from every token of the output."""
    rows = penalty.rows
    first, known = penalty.num_prompt, lengths[rows]
    width = int((known - first).max())
    if width <= 0:
        return
    columns = first[:, None] + torch.arange(width, device=logits.device)
    valid = columns < known[:, None]
    columns = torch.where(valid, columns, first[:, None])  # padding repeats the first output token
    produced = tokens[slots[rows][:, None], columns].long()
    flat, where = logits.view(-1), _flat(logits, rows, produced)
    # A row without output writes back what stood there: its places all hold one token.
    presence = penalty.presence * (known > first)
    flat[where] = flat[where] - presence[:, None]
    frequency = penalty.frequency[:, None] * valid
    flat.scatter_add_(0, where.view(-1), -frequency.view(-1))


def bias(logits: Tensor, entries: Entries) -> None:
    """Add each entry's value to its token's logit."""
    where = _flat(logits, entries.rows, entries.ids)
    logits.view(-1).scatter_add_(0, where, entries.values)


def ban_early_ends(logits: Tensor, entries: Entries, lengths: Tensor) -> None:
    """Mask each entry's token while its row is shorter than ``values`` tokens (prompt included)."""
    early = lengths[entries.rows] < entries.values
    where = _flat(logits, entries.rows, entries.ids)
    logits.view(-1).scatter_add_(0, where, _mask(early))


def ban_words(
    logits: Tensor, words: BadWords, tokens: Tensor, slots: Tensor, lengths: Tensor
) -> None:
    """Mask the last token of each bad word whose other tokens end the row's output."""
    flat, where = logits.view(-1), _flat(logits, words.rows, words.last)
    row = words.rows[words.prefix_word]
    columns = lengths[row] - words.prefix_back
    same = tokens[slots[row], columns.clamp(min=0)] == words.prefix_ids
    missed = ~(same & (columns >= words.num_prompt[words.prefix_word]))
    misses = torch.zeros_like(words.last).index_add_(0, words.prefix_word, missed.long())
    flat.scatter_add_(0, where, _mask(misses == 0))


def _mask(banned: Tensor) -> Tensor:
    """-inf where *banned*, 0 elsewhere; float32."""
    zero = torch.zeros((), device=banned.device)
    return torch.where(banned, zero - torch.inf, zero)
