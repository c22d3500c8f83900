"""The token masks of a step, as the engine core sends them, in the forms that samplers read."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from zlm.messages import Masks


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """Rows that may only use some tokens: ``rows`` int64 [k], ``allowed`` bool [k, V]."""

    rows: Tensor
    allowed: Tensor


def read(masks: Masks, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows, int64 [k], and their mask words, int32 [k, ceil(vocab_size / 32)]."""
    rows = np.frombuffer(masks.rows, np.int32).astype(np.int64)
    words = np.frombuffer(masks.words, np.int32).reshape(len(rows), -(-vocab_size // 32))
    return rows, words


def masked_rows(masks: Masks, vocab_size: int, device: torch.device) -> MaskedRows | None:
    """Return *masks* for the CPU sampler; None if they mask nothing."""
    if not masks.rows:
        return None
    rows, words = read(masks, vocab_size)
    bits = np.unpackbits(words.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
    return MaskedRows(
        torch.from_numpy(rows).to(device), torch.from_numpy(bits.view(np.bool_)).to(device)
    )
