"""Many prompts run while others are still tokenized: a full step's are submitted at a time."""

from collections.abc import Callable
from typing import Any

import pytest
from config_files import LLAMA, write

from zlm import LLM, SamplingParams
from zlm.errors import BadRequest
from zlm.messages import Generate, Submit

CONFIG = LLAMA | {"max_position_embeddings": 256, "torch_dtype": "float32"}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROMPTS = [[5 + i] * 20 for i in range(7)]


@pytest.fixture(scope="module")
def open_small(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LLM]:
    """Make an LLM whose steps have at most 32 tokens: two of the prompts fill one."""
    folder = tmp_path_factory.mktemp("shape")
    write(folder, "config.json", CONFIG)

    def make(**keywords: Any) -> LLM:
        return LLM(
            str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="float32",
            device="cpu",
            cpu_threads=1,
            max_num_batched_tokens=32,
            max_num_seqs=8,
            **keywords,
        )

    return make


def watched(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return where it will be noted when a prompt is tokenized (t) and when submitted (s)."""
    order: list[str] = []
    engine = llm._engine
    handle, submit = engine._core.handle, engine._submit

    def note_handle(message: Any) -> None:
        if isinstance(message, Generate):
            order.append("t")
        handle(message)

    def note_submit(message: Submit) -> None:
        order.append("s")
        submit(message)

    monkeypatch.setattr(engine._core, "handle", note_handle)
    monkeypatch.setattr(engine, "_submit", note_submit)
    return order


def test_a_full_step_is_submitted_at_a_time(
    open_small: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_small() as llm:
        alone = [llm.generate([prompt], GREEDY, use_tqdm=False)[0] for prompt in PROMPTS]
        order = watched(llm, monkeypatch)
        together = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert "".join(order) == "ttss" * 3 + "ts"
        ids = [output.outputs[0].token_ids for output in together]
        assert ids == [output.outputs[0].token_ids for output in alone]


def test_a_refusal_after_others_have_begun_ends_them(open_small: Callable[..., LLM]) -> None:
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    with open_small() as llm:
        with pytest.raises(BadRequest, match=r"prompt 6: .* out of vocabulary"):
            llm.generate([*PROMPTS[:6], [10**6] * 20], long, use_tqdm=False)
        assert llm._engine._sequences == set() and llm._engine.num_open == 0
        (output,) = llm.generate([PROMPTS[0]], GREEDY, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 4


def test_rows_that_were_lost_are_not_waited_for(open_small: Callable[..., LLM]) -> None:
    """A second Ctrl-C may come between a message and its being noted; the engine is idle then."""
    with open_small() as llm:
        llm._engine._sequences.add(10**9)
        with pytest.raises(BadRequest, match="prompt 0"):
            llm.generate([[10**6]], GREEDY, use_tqdm=False)
        assert llm._engine._sequences == set()


def test_all_are_submitted_at_once_where_the_last_may_go_first(
    open_small: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_small(scheduling_policy="priority") as llm:
        order = watched(llm, monkeypatch)
        llm.generate(PROMPTS, GREEDY, priority=list(range(7, 0, -1)), use_tqdm=False)
        assert "".join(order) == "t" * 7 + "s" * 7
