"""Log-probabilities of real checkpoints: those of transformers' raw distribution.

CASES 52, 57, 62: whatever the sampling settings, for prompt and output tokens, in one chunk or
many, with a cold and a warm prefix cache.
"""

from typing import Any

import pytest
import torch

from zlm import LLM, SamplingParams
from zlm.outputs import PositionLogprobs, RequestOutput

TOLERANCE = 1e-3

SETTINGS = {
    "greedy": SamplingParams(temperature=0, max_tokens=8, logprobs=5, prompt_logprobs=2),
    "sampled": SamplingParams(
        temperature=0.2, top_p=0.0001, seed=7, max_tokens=8, logprobs=5, prompt_logprobs=2
    ),
    "penalised": SamplingParams(
        temperature=1.2,
        seed=8,
        repetition_penalty=1.3,
        presence_penalty=1.0,
        logit_bias={100: 5.0},
        max_tokens=8,
        logprobs=5,
        prompt_logprobs=2,
    ),
}


def assert_position(position: PositionLogprobs, token: int, expected: torch.Tensor, k: int) -> None:
    """Check one position against *expected*: transformers' log-probabilities of all ids."""
    assert next(iter(position)) == token  # the token itself stands first
    for token_id, entry in position.items():
        assert entry.logprob == pytest.approx(expected[token_id].item(), abs=TOLERANCE)
    likelier = expected - expected[token]
    rank = position[token].rank or 0
    assert (likelier > TOLERANCE).sum() < rank <= (likelier > -TOLERANCE).sum()
    best = sorted((entry.logprob for entry in position.values()), reverse=True)[:k]
    assert best == pytest.approx(torch.topk(expected, k).values.tolist(), abs=TOLERANCE)


def assert_output(checkpoint: Any, output: RequestOutput) -> None:
    prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
    expected = torch.log_softmax(checkpoint.logits(prompt + answer), -1)
    assert output.prompt_logprobs is not None and output.outputs[0].logprobs is not None
    assert len(output.prompt_logprobs) == len(prompt) and output.prompt_logprobs[0] is None
    for index, position in enumerate(output.prompt_logprobs[1:], 1):
        assert position is not None
        assert_position(position, prompt[index], expected[index - 1], 2)
    assert len(output.outputs[0].logprobs) == len(answer)
    for index, position in enumerate(output.outputs[0].logprobs, len(prompt) - 1):
        assert_position(position, answer[index - len(prompt) + 1], expected[index], 5)
    total = sum(p[t].logprob for p, t in zip(output.outputs[0].logprobs, answer, strict=True))
    assert output.outputs[0].cumulative_logprob == pytest.approx(total)


@pytest.mark.parametrize("setting", SETTINGS)
def test_logprobs_equal_transformers(
    setting: str, checkpoint: Any, llm: LLM, alone: list[RequestOutput]
) -> None:
    prompts = [alone[i].prompt_token_ids for i in (0, 5, 10)]
    for _ in ("cold", "warm"):
        for output in llm.generate(prompts, SETTINGS[setting], use_tqdm=False):
            assert_output(checkpoint, output)
