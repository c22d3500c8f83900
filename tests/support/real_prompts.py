"""Twenty prompts for real checkpoints, and what is asked of an ``LLM`` with them.

Lengths are mixed: from one token to more than Gemma 3's sliding window.
"""

from typing import TYPE_CHECKING, Any

from zlm.outputs import PositionLogprobs, RequestOutput
from zlm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from zlm import LLM

STORY = """\
The lighthouse keeper had not spoken to anyone for eleven days when the boat came in. He watched it
from the gallery, a small grey thing that climbed each wave as if it might not come down again, and
he counted the people in it: three, then two, then three once more as someone rose from the bottom
of the hull with a rope. He went down the stairs slowly. There were one hundred and ninety-two of
them, and he had painted every second one white so that he could find his way in the dark. """

TEXTS = [
    STORY,
    "Summary of the text below.\n\n" + STORY * 2 + "\n\nSummary:",
    "She opened the letter and read it twice. " * 24,
    STORY * 6 + "At the bottom he",  # longer than Gemma 3's sliding window of 512 tokens
    "The",
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "1, 2, 3, 4, 5, 6, 7,",
    "Water boils at 100 degrees Celsius and freezes at",
    "Once upon a time there was a girl who lived at the edge of a forest. Every morning she",
    "Q: What is the capital of Italy?\nA:",
    "The days of the week are Monday, Tuesday,",
    "import numpy as np\n\ndef mean(values):\n    total = 0\n    for value in values:\n       ",
    "Dear Sir or Madam,\n\nI am writing to complain about the train that",
    "Zürich liegt in der Schweiz, Wien in Österreich und Berlin in",
    "A recipe for bread: 500 g flour, 350 g water, 10 g salt, 5 g yeast. First,",
    "| name | age |\n|---|---|\n| Ann | 31 |\n| Bob | 29 |\n|",
    "Roses are red, violets are blue,",
    '{"name": "Alice", "email": "alice@example.com", "address": {"street": "',
    "To be, or not to be, that is the question:",
]

LIMITS: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 16}
SMALL_POOL_BLOCKS = 46  # the longest prompt and its answer take 44; all twenty, some 130
THREE = SamplingParams(n=3, temperature=0.9, seed=11, max_tokens=24, ignore_eos=True, logprobs=1)
SMALLEST_GAP = 1e-3  # of logits: below it, float32 noise decides between two tokens


def greedy(max_tokens: int = 24) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def one_by_one(
    llm: "LLM", prompts: list[str] | list[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[RequestOutput]:
    """Answer each prompt in a call of its own, so that none has company."""
    each = params if isinstance(params, list) else [params] * len(prompts)
    return [
        llm.generate([prompt], one, use_tqdm=False)[0]
        for prompt, one in zip(prompts, each, strict=True)
    ]


def prompts_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.prompt_token_ids for output in outputs]


def ids_of(output: RequestOutput) -> list[int]:
    """Return the ids of the first sample."""
    return output.outputs[0].token_ids


def assert_same_ids(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for index, (output, wanted) in enumerate(zip(outputs, expected, strict=True)):
        assert ids_of(output) == ids_of(wanted), f"prompt {index}"


def assert_same_all_at_once(
    llm: "LLM", alone: list[RequestOutput], params: SamplingParams
) -> list[RequestOutput]:
    """Run every prompt in one call, sixteen at a time; expect the ids of *alone*."""
    outputs = llm.generate(prompts_of(alone), params, use_tqdm=False)
    assert_same_ids(outputs, alone)
    return outputs


def values_of(positions: list[PositionLogprobs] | None) -> list[dict[int, float]]:
    """Return the log-probability of each candidate of each position."""
    assert positions is not None
    return [{i: entry.logprob for i, entry in position.items()} for position in positions]


# What the mixed requests ask for, over and over; each request has a seed of its own.
MIXTURE: list[dict[str, Any]] = [
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 1.2, "min_p": 0.05},
    {"temperature": 1.0, "top_p": 0.8, "top_k": 20, "min_p": 0.02, "logprobs": 3},
    {"temperature": 0.9, "repetition_penalty": 1.2},
    {"temperature": 0.8, "presence_penalty": 0.7, "frequency_penalty": 0.3, "logprobs": 0},
    {"temperature": 0, "logprobs": 5},
    {"temperature": 1.0, "logit_bias": {300: 3.0, 500: -100.0, 700: 2.0}},
    {"temperature": 0.6, "allowed_token_ids": list(range(300, 900)), "logprobs": 1},
    {"temperature": 0, "repetition_penalty": 1.3, "logprobs": 20},
    {"temperature": 0.9, "bad_words": [" the", " of"], "top_p": 0.95},
    {"temperature": 0.5, "prompt_logprobs": 2},
]


def mixed() -> list[SamplingParams]:
    """Return parameters of every kind, one for each of TEXTS."""
    return [
        SamplingParams(max_tokens=24, ignore_eos=True, seed=1000 + i, **MIXTURE[i % len(MIXTURE)])
        for i in range(len(TEXTS))
    ]
