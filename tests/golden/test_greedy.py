"""Greedy ids of real checkpoints in float32: those of transformers, in every way of computing them.

Covers the exactness that the design promises: company, chunking, prefix cache, preemption.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from real_prompts import SMALL_POOL_BLOCKS, SMALLEST_GAP, assert_same_all_at_once

from zlm import LLM, SamplingParams
from zlm.outputs import RequestOutput

WAYS: dict[str, dict[str, Any]] = {
    "chunks-64-no-cache": {"max_num_batched_tokens": 64, "enable_prefix_caching": False},
    "chunks-16-cache": {"max_num_batched_tokens": 16},
    "small-pool-cache": {
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": SMALL_POOL_BLOCKS,
    },
    "small-pool-no-cache": {
        "max_num_batched_tokens": 2048,
        "num_gpu_blocks_override": SMALL_POOL_BLOCKS,
        "enable_prefix_caching": False,
    },
}


def test_alone_equals_transformers(
    checkpoint: Any, alone: list[RequestOutput], greedy: SamplingParams
) -> None:
    for index, output in enumerate(alone):
        prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
        assert len(answer) == greedy.max_tokens
        best = torch.topk(checkpoint.along(prompt, answer), 2)
        gap = (best.values[:, 0] - best.values[:, 1]).min().item()
        assert gap > SMALLEST_GAP, f"prompt {index} has a tie: it decides nothing, choose another"
        assert best.indices[:, 0].tolist() == answer, f"prompt {index}"


def test_in_company_with_a_warm_prefix_cache(
    llm: LLM, alone: list[RequestOutput], greedy: SamplingParams
) -> None:
    outputs = assert_same_all_at_once(llm, alone, greedy)
    assert max(output.num_cached_tokens for output in outputs) > 512  # the longest prompt hits


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_same_ids(
    way: str, open_llm: Callable[..., LLM], alone: list[RequestOutput], greedy: SamplingParams
) -> None:
    with open_llm(**WAYS[way]) as llm:
        assert_same_all_at_once(llm, alone, greedy)
        if way.startswith("small-pool"):
            assert llm.stats().preemptions > 0
