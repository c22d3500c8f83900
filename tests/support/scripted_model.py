"""A tokenizer core that is told scripted texts as if a model had said them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from zlm.config import ServerOptions
from zlm.messages import FINISH_EOS, RUNNING, ChatPrompt, Delta, ToolOptions
from zlm.tokenizer.output_parts import joined_calls

USER = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


class Model:
    """A core that is told scripted texts as if a model had said them."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.number = 0
        self.tools: list[dict[str, Any]] = TOOLS
        self.names = ["f"]
        self.continues = ""  # the start of the answer, which the client knows

    @classmethod
    def of(
        cls,
        make_engine: Callable,
        save_folder: Callable,
        template: str,
        *,
        specials: tuple[str, ...] = (),
        **server: Any,
    ) -> "Model":
        """Return a core with *template*; the fixtures make its engine and its tokenizer."""
        folder: Path = save_folder(chat_template=template)
        if specials:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
            tokenizer.save(str(folder / "tokenizer.json"))
        options = ServerOptions(**server)
        return cls(make_engine(folder=folder, server=options, max_model_len=4096))

    def ask(
        self, *, choice: str | None = "auto", parallel: bool = True, kwargs: Any = None, **more: Any
    ) -> int:
        """Send a request; return its sequence's id."""
        self.number += 1
        options = None if choice is None else ToolOptions(self.names, choice, parallel)
        answer = [{"role": "assistant", "content": self.continues}] if self.continues else []
        chat = ChatPrompt(
            [*USER, *answer],
            tools=self.tools if options else None,
            template_kwargs=kwargs,
            add_generation_prompt=not self.continues,
            continue_final_message=bool(self.continues),
        )
        (submit,) = self.engine.generate(
            chat=chat, request_id=self.number, tools=options, split_reasoning=True, **more
        )
        return int(submit.seq_id)

    def say(self, text: str, *, finish: int = FINISH_EOS, **fields: Any) -> list[Delta]:
        seq_id = self.ask(**fields)
        tokens = self.engine.core.vocabulary.encode(text)
        if finish == FINISH_EOS:
            tokens.append(2)
        deltas: list[Delta] = []
        for k, token in enumerate(tokens):
            code = finish if k == len(tokens) - 1 else RUNNING
            for answer in self.engine.step((seq_id, token, code)):
                deltas += answer.items
        return deltas

    def answer(self, text: str, **fields: Any) -> tuple[str, str, list[tuple[Any, str]], Any]:
        """Return reasoning, content, calls and finish reason, the same in both modes."""
        streamed = self.say(text, stream=True, **fields)
        (whole,) = self.say(text, stream=False, **fields)
        assert all(
            d.text or d.reasoning or d.tool_calls or d.finish_reason is not None for d in streamed
        )
        assert [d.finish_reason is None for d in streamed] == [True] * (len(streamed) - 1) + [False]
        assert "".join(d.text for d in streamed) == whole.text
        assert "".join(d.reasoning for d in streamed) == whole.reasoning
        assert streamed[-1].finish_reason == whole.finish_reason
        pieces = [call for d in streamed for call in d.tool_calls]
        for first, piece in enumerate(pieces):
            opens = all(piece.index != other.index for other in pieces[:first])
            assert (piece.id is not None) == (piece.name is not None) == opens
        calls = [(c.name, c.arguments) for c in whole.tool_calls]
        assert [(c.name, c.arguments) for c in joined_calls(pieces)] == calls
        assert [c.index for c in whole.tool_calls] == list(range(len(calls)))
        return whole.reasoning, whole.text, calls, whole.finish_reason
