"""Throughput and latency of the offline ``LLM``, case by case.

Prompts are random token ids, all submitted at once and the same in every run; greedy, EOS ignored,
no prefix cache, no tokenizer. A case runs once to warm up and then as often as is asked for.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zlm.errors import ConfigError, Internal
from zlm.loadtest.figures import percentile

if TYPE_CHECKING:  # importing the offline engine would slow --help down
    from zlm.llm import LLM

EDGE_IDS = 10  # at either end of the vocabulary, special tokens mostly, that prompts have none of
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Case:
    """So many requests at once, each of so many tokens in and out."""

    name: str
    requests: int
    prompt: int
    output: int

    @classmethod
    def parse(cls, text: str) -> "Case":
        """Return a case by its name or as REQUESTS:INPUT:OUTPUT. Raises ConfigError."""
        if text in CASES:
            return CASES[text]
        try:
            requests, prompt, output = map(int, text.split(":"))
        except ValueError:
            requests = prompt = output = 0
        if min(requests, prompt, output) < 1:
            names = ", ".join(CASES)
            raise ConfigError(f"no case {text!r}: give REQUESTS:INPUT:OUTPUT or one of {names}")
        return cls(text, requests, prompt, output)


CASES = {
    "b1": Case("b1", 1, 128, 256),
    "b8": Case("b8", 8, 512, 256),
    "b64": Case("b64", 64, 512, 256),
    "b256": Case("b256", 256, 512, 256),
    "prefill": Case("prefill", 16, 4096, 1),
}


def measured(
    path: str, cases: Sequence[Case], reps: int, keywords: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Make an ``LLM`` of the model at *path*; yield its start and then each case's figures.

    keywords: of ``LLM``, beside those that make a fair measurement.
    """
    from zlm.llm import LLM
    from zlm.models.config import load_spec

    vocab = load_spec(path).vocab_size
    began = time.perf_counter()
    fair = {"skip_tokenizer_init": True, "enable_prefix_caching": False}
    with LLM(path, **{**fair, **keywords}) as llm:
        yield {"case": "start_s", "value": round(time.perf_counter() - began, 2)}
        rng = random.Random(0)
        for case in cases:
            yield {"case": case.name, **_figures(llm, case, reps, _ids(rng, vocab))}


def _ids(rng: random.Random, vocab: int) -> Callable[[int], list[int]]:
    ids = range(EDGE_IDS, vocab - EDGE_IDS)
    return lambda tokens: rng.choices(ids, k=tokens)


def _figures(llm: "LLM", case: Case, reps: int, ids: Callable[[int], list[int]]) -> dict[str, Any]:
    """Run *case* ``reps`` times after a warm-up; rates are of the median repetition."""
    from zlm.sampling_params import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=case.output, ignore_eos=True, detokenize=False
    )
    seconds = []
    steps = llm.stats().steps
    for _ in range(reps + 1):
        prompts = [{"prompt_token_ids": ids(case.prompt)} for _ in range(case.requests)]
        began = time.perf_counter()
        answers = llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - began)
        for answer in answers:
            if answer.error is not None or len(answer.outputs[0].token_ids) != case.output:
                raise Internal(f"request {answer.request_id} failed: {answer}")
    del seconds[0]
    median = statistics.median(seconds)
    tokens = case.requests * case.output
    return {
        "n": case.requests,
        "prompt": case.prompt,
        "output": case.output,
        "s": [round(each, 4) for each in seconds],
        **{f"s_p{p}": round(percentile(seconds, p) or 0.0, 4) for p in PERCENTILES},
        "s_mean": round(statistics.fmean(seconds), 4),
        "out_tok_s": round(tokens / median, 1),
        "total_tok_s": round((tokens + case.requests * case.prompt) / median, 1),
        "steps": round((llm.stats().steps - steps) / (reps + 1)),  # of one repetition
    }
