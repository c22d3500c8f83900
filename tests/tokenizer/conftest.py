"""Tiny tokenizers made here, folders that hold them, and a core with a fake engine around it."""

import json
from array import array
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from specs import small_spec
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from zlm.config import Config, GenerationDefaults, ModelOptions, Resolved, ServerOptions
from zlm.messages import (
    FINISH_LENGTH,
    RUNNING,
    Abort,
    ChatPrompt,
    Delta,
    Deltas,
    Failed,
    Generate,
    LogprobColumns,
    SequenceError,
    StepOutput,
    Submit,
    TokenBytes,
)
from zlm.sampling_params import SamplingParams
from zlm.tokenizer.core import TokenizerCore
from zlm.tokenizer.load import load_vocabulary
from zlm.tokenizer.vocabulary import Vocabulary

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Numbers: 12345, 67890.",
    "naïve café, Größe, Příliš žluťoučký kůň; 日本語のテスト; emoji 😀 and 👩‍👩‍👧.",
    "def f(x):\n    return x ** 2\n\nassistant user system\n\tmarker <|im_start|>",
]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level_tokenizer() -> Tokenizer:
    """Byte-level BPE with ChatML markers at ids 0..2, and no BOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


def sentencepiece_tokenizer(*, prefix: bool) -> Tokenizer:
    """SentencePiece-like BPE: <unk> <s> </s>, byte tokens, letters, a few merges; adds BOS."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁"]
    pieces += [chr(c) for c in range(ord("!"), ord("~") + 1)]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("P", "a"), ("r", "i"), ("Pa", "ri")]
    merges += [("Pari", "s"), ("▁", "Paris"), ("▁", "▁"), ("▁", "a"), ("i", "s"), ("▁", "is")]
    pieces += [left + right for left, right in merges]
    model = models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=merges,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")]
    )
    spaces = normalizers.Replace(" ", "▁")
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        decoding.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(decoding)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["<s>:0", "$A:0"], special_tokens=[("<s>", 1)]
    )
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """As the SentencePiece-like one, with Metaspace at both ends."""
    tokenizer = sentencepiece_tokenizer(prefix=False)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level_tokenizer,
    "sentencepiece": lambda: sentencepiece_tokenizer(prefix=True),
    "no_prefix": lambda: sentencepiece_tokenizer(prefix=False),
    "metaspace": metaspace_tokenizer,
}


@pytest.fixture(scope="session")
def vocabularies() -> dict[str, Vocabulary]:
    """One vocabulary of each kind, by name."""
    return {name: Vocabulary(make()) for name, make in TOKENIZERS.items()}


@pytest.fixture(scope="session")
def load_real() -> Callable[[Path], Vocabulary]:
    """Return a function that loads a real vocabulary, once."""
    return cache(lambda path: load_vocabulary(str(path)))


@pytest.fixture
def save_folder(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that saves a tokenizer of a kind as a Hugging Face folder."""

    def save(
        kind: str = "byte_level", *, chat_template: str | None = CHATML, **config: Any
    ) -> Path:
        TOKENIZERS[kind]().save(str(tmp_path / "tokenizer.json"))
        if chat_template is not None:
            config["chat_template"] = chat_template
        if kind == "byte_level":
            config.setdefault("eos_token", "<|im_end|>")
        else:
            config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | config
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return tmp_path

    return save


class FakeEngine:
    """Takes what the core submits; ``step`` makes it tell the core tokens, as the engine would."""

    def __init__(self, resolved: Resolved, run_later: Callable | None = None) -> None:
        self.resolved = resolved
        self.submits: list[Submit] = []
        self.vocabularies: list[TokenBytes] = []
        self.aborts: list[int] = []
        self.answers: list[Any] = []
        self.core = TokenizerCore(
            resolved,
            3,
            to_engine=self._take,
            to_frontend=lambda i, m: self.answers.append(m),
            run_later=run_later,
        )

    def _take(self, message: Submit | Abort | TokenBytes) -> None:
        if isinstance(message, TokenBytes):
            self.vocabularies.append(message)
        elif isinstance(message, Submit):
            self.submits.append(message)
        else:
            self.aborts += message.seq_ids

    def generate(
        self, prompt: Any = "The fox", *, request_id: int = 1, chat: Any = None, **keywords: Any
    ) -> list[Submit]:
        """Send a request; return its submissions."""
        known = SamplingParams.__struct_fields__
        params = {k: keywords.pop(k) for k in list(keywords) if k in known}
        params.setdefault("temperature", 0.0)
        asked = SamplingParams()
        for name, value in params.items():
            setattr(asked, name, value)  # made wrong, it would be refused here already
        before = len(self.submits)
        if isinstance(chat, list):
            chat = ChatPrompt(chat)
        prompts = [] if chat is not None else prompt if _is_many(prompt) else [prompt]
        self.core.handle(
            Generate(
                request_id=request_id,
                arrival=1.5,
                prompts=prompts,
                params=asked,
                chat=chat,
                **keywords,
            )
        )
        return self.submits[before:]

    def step(
        self,
        *rows: tuple[int, int, int],
        logprobs: LogprobColumns | None = None,
        prompt_logprobs: LogprobColumns | None = None,
        cached: list[tuple[int, int]] | None = None,
        times: list[tuple[int, float, float]] | None = None,
        errors: list[SequenceError] | None = None,
    ) -> list[Any]:
        """Tell the core one step of rows (sequence, token, finish); return its new answers."""
        before = len(self.answers)
        self.core.handle(
            StepOutput(
                seq_ids=array("q", [row[0] for row in rows]).tobytes(),
                token_ids=array("i", [row[1] for row in rows]).tobytes(),
                finish=bytes(row[2] for row in rows),
                cached=cached or [],
                times=times or [],
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                errors=errors or [],
            )
        )
        return self.answers[before:]

    def run(self, seq_id: int, token_ids: list[int], *, finish: int = FINISH_LENGTH) -> list[Delta]:
        """Tell the core *token_ids* one a step, the last one with *finish*; return all deltas."""
        deltas: list[Delta] = []
        for k, token_id in enumerate(token_ids):
            last = k == len(token_ids) - 1
            for answer in self.step((seq_id, token_id, finish if last else RUNNING)):
                deltas += answer.items
        return deltas

    def failed(self) -> Failed:
        """Return the last answer, which must be a failure."""
        answer = self.answers[-1]
        assert isinstance(answer, Failed)
        return answer

    def deltas(self) -> list[Delta]:
        return [delta for a in self.answers if isinstance(a, Deltas) for delta in a.items]


def _is_many(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)


@pytest.fixture
def make_engine(save_folder: Callable[..., Path]) -> Iterator[Callable[..., FakeEngine]]:
    """Return a function that makes a core around a tiny tokenizer, with a fake engine."""
    made: list[FakeEngine] = []

    def make(
        kind: str = "byte_level",
        *,
        max_model_len: int = 256,
        vocab_size: int = 512,
        eos: tuple[int, ...] = (2,),
        generation: GenerationDefaults | None = None,
        server: ServerOptions | None = None,
        seed: int | None = None,
        folder: Path | None = None,
        chat_template_flag: str | None = None,
        run_later: Callable | None = None,
        **config: Any,
    ) -> FakeEngine:
        path = str(folder or save_folder(kind, **config))
        spec = small_spec(
            vocab_size=vocab_size,
            max_position=max_model_len,
            eos_token_ids=eos,
            generation=generation or GenerationDefaults(),
        )
        options = ModelOptions(model=path, seed=seed, chat_template=chat_template_flag)
        resolved = Resolved(
            config=Config(model=options, server=server or ServerOptions()),
            spec=spec,
            model_path=path,
            tokenizer_path=path,
            served_names=("tiny",),
            device="cpu",
            max_model_len=max_model_len,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            kv_groups=(),
        )
        # As it comes to a process: over the wire.
        resolved = msgspec.msgpack.decode(msgspec.msgpack.encode(resolved), type=Resolved)
        made.append(FakeEngine(resolved, run_later))
        return made[-1]

    yield make
    for engine in made:
        engine.core.close()


def columns(rows: list[tuple[int, list[tuple[int, float]]]]) -> LogprobColumns:
    """Return columns of (row, [(token, value), ...]), each of rank 1."""
    flat = [pair for _, entries in rows for pair in entries]
    return LogprobColumns(
        rows=array("i", [row for row, _ in rows]).tobytes(),
        counts=array("i", [len(entries) for _, entries in rows]).tobytes(),
        ranks=array("i", [1] * len(rows)).tobytes(),
        ids=array("i", [token_id for token_id, _ in flat]).tobytes(),
        values=array("f", [value for _, value in flat]).tobytes(),
    )


@pytest.fixture(name="columns")
def columns_fixture() -> Callable[..., LogprobColumns]:
    return columns
