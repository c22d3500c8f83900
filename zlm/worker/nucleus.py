"""Drawing from a cut distribution: top_k and top_p without sorting the vocabulary.

``draw`` takes the likeliest candidates of every row (``topk``), finds in them the value below which
tokens are cut, and races the rest. A row whose cut lies further down than the candidates reach goes
round again with more of them, at last with the whole vocabulary sorted. The cut is a *value*: all
tokens that equal it stay, so the set does not depend on the order of a sort or on the batch.

Order of API: min_p, then top_k, then top_p of what is left; the best token always stays.
"""

import torch
from torch import Tensor

from zlm.worker.rng import exponentials
from zlm.worker.sampling_table import RandomRows

FIRST_CANDIDATES = 256  # nuclei of trained models are mostly smaller
GROWTH = 8  # more candidates in the next round


def draw(scaled: Tensor, keys: Tensor, params: RandomRows, which: Tensor) -> Tensor:
    """Return the drawn ids, int64 [m], of rows ``which`` of *params*.

    ``scaled`` float32 [m, V]: logits over temperature, less their maximum; ``keys`` int32 [m, 2].
    """
    vocab_size = scaled.shape[1]
    size = params.largest_top_k + 1  # one more shows whether ties reach further
    if params.open_ended:
        size = max(size, FIRST_CANDIDATES)
    drawn = torch.empty(len(scaled), dtype=torch.int64, device=scaled.device)
    left = torch.arange(len(scaled), device=scaled.device)
    while True:
        size = min(size, vocab_size)
        values, ids = scaled.topk(size, dim=-1)
        cut = _cut(scaled, values, params, which)
        weights = values.exp().masked_fill_(values < cut, 0.0)
        weights /= exponentials(keys, ids.to(torch.int32))
        drawn[left] = ids.gather(1, weights.argmax(-1, keepdim=True)).squeeze(1)
        if size == vocab_size:
            return drawn
        again = (values[:, -1:] >= cut).squeeze(1).nonzero().squeeze(1)
        if not again.numel():
            return drawn
        scaled, keys, which, left = scaled[again], keys[again], which[again], left[again]
        size *= GROWTH


def _cut(scaled: Tensor, values: Tensor, params: RandomRows, which: Tensor) -> Tensor:
    """Return the least value that stays, float32 [m, 1], as far as candidates *values* tell.

    ``values`` float32 [m, size] are the largest of each row of ``scaled``, in falling order. A cut
    at or below the last of them means that the candidates may not reach far enough.
    """
    size = values.shape[1]
    top_k, top_p = params.top_k[which, None], params.top_p[which, None]
    cut = params.min_p[which, None].log()  # min_p 0: -inf
    kth = values.gather(1, (top_k - 1).clamp(0, size - 1))
    limited = (top_k > 0) & (top_k <= size)
    cut = torch.where(limited, torch.maximum(cut, kth), cut)
    probability = values.double().exp().masked_fill_(values < cut, 0.0)
    total = probability.sum(-1, keepdim=True)
    if params.open_ended:
        everything = scaled.exp().masked_fill_(scaled < cut, 0.0).sum(-1, keepdim=True)
        total = torch.where(limited, total, everything.double())
    before = probability.cumsum(-1) - probability
    stays = (before < top_p * total) & (values >= cut)
    stays[:, 0] = True
    last = values.gather(1, (stays.sum(-1, keepdim=True) - 1))
    return torch.where(top_p < 1.0, last, cut)
