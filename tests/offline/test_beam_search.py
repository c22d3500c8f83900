"""``LLM.beam_search`` finds what transformers finds, token by token and score by score."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from zlm import LLM, BeamSearchParams
from zlm.beam_search import BeamSearch
from zlm.errors import BadRequest, TooLong
from zlm.outputs import BeamSearchSequence, Logprob

END_IDS = {2, *range(5, 320, 40)}  # of ``tiny_path``
PROMPTS = [[7, 8, 9, 10], [100, 7], [33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 46, 47, 48]]


@pytest.fixture(scope="module")
def tiny(tiny_path: Path) -> Iterator[LLM]:
    with LLM(tiny_path, dtype="float32", device="cpu", cpu_threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(tiny_path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32).eval()


def outputs(sequence: BeamSearchSequence) -> list[int]:
    """Return the tokens of the output, with the one that ended it."""
    return [next(iter(position)) for position in sequence.logprobs]


@pytest.mark.parametrize(
    ("width", "penalty", "ignore_eos"),
    [(2, 1.0, False), (4, 1.0, False), (4, 0.0, False), (3, -1.0, False), (5, 2.0, True)],
)
def test_the_same_outputs_as_transformers(
    tiny: LLM, reference: Any, width: int, penalty: float, ignore_eos: bool
) -> None:
    params = BeamSearchParams(
        beam_width=width, max_tokens=12, length_penalty=penalty, ignore_eos=ignore_eos
    )
    found = tiny.beam_search([{"prompt_token_ids": ids} for ids in PROMPTS], params)
    for prompt, output in zip(PROMPTS, found, strict=True):
        wanted = reference.generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            early_stopping="never",
            max_new_tokens=12,
            length_penalty=penalty,
            do_sample=False,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
            **({"eos_token_id": None} if ignore_eos else {}),
        )
        for ours, ids, score in zip(
            output.sequences, wanted.sequences, wanted.sequences_scores, strict=True
        ):
            tokens = ids[len(prompt) :].tolist()  # and then padding
            ends = [] if ignore_eos else [i for i, token in enumerate(tokens) if token in END_IDS]
            assert outputs(ours) == tokens[: ends[0] + 1 if ends else None]
            assert ours.score == pytest.approx(float(score), abs=1e-4)


def test_what_a_sequence_tells(tiny: LLM) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=12)
    [plain] = tiny.beam_search({"prompt_token_ids": PROMPTS[0]}, params)
    params.include_stop_str_in_output = True
    [shown] = tiny.beam_search({"prompt_token_ids": PROMPTS[0]}, params)
    reasons = {sequence.finish_reason for sequence in plain.sequences}
    assert "stop" in reasons, "some of them must end with an EOS token"
    for without, with_end in zip(plain.sequences, shown.sequences, strict=True):
        total = sum(next(iter(p.values())).logprob for p in without.logprobs)
        assert without.cum_logprob == pytest.approx(total)
        assert with_end.tokens == PROMPTS[0] + outputs(with_end)
        is_stopped = without.finish_reason == "stop"
        assert without.tokens == with_end.tokens[: -1 if is_stopped else None]
        assert without.stop_reason == (with_end.tokens[-1] if is_stopped else None)
        assert without.text == tiny._engine.detokenize(without.tokens)
    scores = [sequence.score for sequence in plain.sequences]
    assert scores == sorted(scores, reverse=True)


def test_refusals(tiny: LLM) -> None:
    with pytest.raises(BadRequest, match="beam_width must be at most 11 with 9 EOS ids, got 13"):
        tiny.beam_search("a", BeamSearchParams(beam_width=13, max_tokens=4))
    with pytest.raises(BadRequest, match="temperature must be 0 or 1 in beam search"):
        tiny.beam_search("a", BeamSearchParams(beam_width=2, max_tokens=4, temperature=0.5))
    with pytest.raises(TooLong, match=r"prompt 1: .* max_tokens 511 exceed the 512"):
        tiny.beam_search([[7], [7, 8]], BeamSearchParams(beam_width=2, max_tokens=511))
    with pytest.raises(BadRequest, match="prompt 1"):
        tiny.beam_search([[7], [10**6]], BeamSearchParams(beam_width=2, max_tokens=4))


def test_a_search_ends_when_nothing_can_become_better() -> None:
    search = BeamSearch(BeamSearchParams(beam_width=1, max_tokens=50), frozenset({0}))
    search.advance([[(1, Logprob(-0.1)), (0, Logprob(-3.0))]])
    assert search.running and not search.finished, "EOS was not among the best"
    search.advance([[(0, Logprob(-0.01)), (1, Logprob(-9.0))]])
    assert not search.running, "-9.1 over 50 tokens is less than -0.11 over 2"
    assert [beam.tokens for _, beam in search.finished] == [(1, 0)]
