"""A shape without a tokenizer: ids in, ids out, and clear words for everything else."""

from collections.abc import Iterator

import pytest
from config_files import LLAMA, write

from zlm import LLM, SamplingParams
from zlm.errors import BadRequest, ConfigError

CONFIG = LLAMA | {"max_position_embeddings": 256, "torch_dtype": "float32"}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("shape")
    write(folder, "config.json", CONFIG)
    return str(folder)


@pytest.fixture(scope="module")
def ids_only(shape: str) -> Iterator[LLM]:
    keywords = {"load_format": "dummy", "dtype": "float32", "device": "cpu", "cpu_threads": 1}
    with LLM(shape, skip_tokenizer_init=True, **keywords) as llm:
        yield llm


@pytest.mark.parametrize("detokenize", [True, False])
def test_ids_in_ids_out(ids_only: LLM, detokenize: bool) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=6, ignore_eos=True, detokenize=detokenize, logprobs=2
    )
    prompts = [[5, 6, 7], {"prompt_token_ids": [299]}]
    first, second = ids_only.generate(prompts, params, use_tqdm=False)
    assert first.prompt_token_ids == [5, 6, 7] and second.prompt_token_ids == [299]
    for output in (first, second):
        (completion,) = output.outputs
        assert len(completion.token_ids) == 6 and completion.text == ""
        assert completion.logprobs is not None and len(completion.logprobs) == 6


def test_the_report_covers_every_run_at_once(ids_only: LLM) -> None:
    for _ in range(5):
        before = ids_only.stats().generation_tokens
        ids_only.generate([[1, 2], [3]], GREEDY, use_tqdm=False)
        assert ids_only.stats().generation_tokens - before == 12


@pytest.mark.parametrize(
    "params",
    [SamplingParams(stop="x"), SamplingParams(bad_words=["x"])],
    ids=["stop", "bad words"],
)
def test_parameters_that_are_text_are_refused(ids_only: LLM, params: SamplingParams) -> None:
    with pytest.raises(BadRequest, match="skip-tokenizer-init"):
        ids_only.generate([[1, 2]], params, use_tqdm=False)


def test_text_is_refused(ids_only: LLM) -> None:
    with pytest.raises(BadRequest, match=r"prompt 0: .*token ids"):
        ids_only.generate("hello", GREEDY, use_tqdm=False)
    with pytest.raises(BadRequest, match="no chat template"):
        ids_only.chat([{"role": "user", "content": "hello"}], GREEDY, use_tqdm=False)


@pytest.mark.parametrize("keyword", ["tokenizer", "chat_template"])
def test_contradictions_are_refused(shape: str, keyword: str) -> None:
    with pytest.raises(ConfigError, match=f"--{keyword.replace('_', '-')} has no use"):
        LLM(shape, skip_tokenizer_init=True, **{keyword: "{x}"})
