"""Every kernel of sampling run once, so that none is compiled when a request comes.

Kernels are compiled for what is constant (a vocabulary, a token table) and for what a batch asks
for; the sequences made up here ask for everything in all the ways that differ.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from zlm.messages import Join, SamplingSpec
from zlm.worker.gpu_sampler import GpuSampler
from zlm.worker.gpu_sampler_report import SIZES
from zlm.worker.sampling_slots import UNUSED

ONE_ID = np.zeros(1, np.int32).tobytes()
PENALTIES = {"repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": 1.0}
LISTS = {
    "allowed_ids": ONE_ID,
    "bias_ids": ONE_ID,
    "bias_values": np.ones(1, np.float32).tobytes(),
    "bad_words": [ONE_ID],
    "min_tokens": 1,
    "banned_until_min": ONE_ID,
}
CUTS = {"temperature": 0.9, "top_k": 2, "top_p": 0.9, "min_p": 0.01}


def warm(sampler: GpuSampler, logits: Tensor) -> None:
    """Sample from *logits* (float32 [S, V], used up) in every way, in slot 0; leave it unused.

    The slot's row of the token table is written. Counts and masks are allocated.
    """
    count, device = len(logits), logits.device
    hosts = np.full(count, sampler.dummy_slot)
    hosts[0] = 0
    slots = torch.from_numpy(hosts.astype(np.int32)).to(device)
    lengths = torch.ones(count, dtype=torch.int32, device=device)
    out: dict[str, Any] = {
        "tokens_out": torch.empty(count, dtype=torch.int32, device=device),
        "status_out": torch.empty(count, dtype=torch.uint8, device=device),
    }
    for cut in (False, True):
        sampler.draw(logits, slots, lengths, **out, cut=cut)
    asked = (PENALTIES, LISTS, PENALTIES | LISTS | CUTS)
    for parameters, alternatives in zip(asked, SIZES, strict=True):
        spec = SamplingSpec(seed=0, logprobs=alternatives, **parameters)  # type: ignore[arg-type]
        sampler.join([Join(0, ONE_ID, 1, spec)])
        sampler.full(logits, slots, lengths, hosts, **out)
    sampler.join([Join(0, ONE_ID, 1, UNUSED)])
