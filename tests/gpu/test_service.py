"""The server on a GPU: what is masked, called or embedded is as on the CPU. Needs no real model."""

import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from json_schemas import schemas
from running_server import MODEL, Server
from tiny import tiny_checkpoint
from tiny_embedders import tiny_embedder

from zlm import LLM

pytest.importorskip("llguidance", reason="llguidance is not installed")

MEMORY = 64 * 2**20
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    '{% if tools %}<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>{% endif %}assistant:'
)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("service")
    path = tiny_checkpoint(folder / "model", "llama")
    (folder / "template.jinja").write_text(TEMPLATE)
    flags = ["--device", device(), "--served-model-name", MODEL, "--max-model-len", "512"]
    flags += ["--kv-cache-memory-bytes", str(MEMORY), "--max-num-seqs", "16"]
    flags += ["--chat-template", str(folder / "template.jinja"), "--enable-auto-tool-choice"]
    program = [sys.executable, "-m", "zlm.cli.main", "serve"]
    with Server(path, folder / "log", flags, program=program) as made:
        yield made


def chat(server: Server, **fields: Any) -> Any:
    messages = [{"role": "user", "content": "Fill it in."}]
    body = {"model": MODEL, "messages": messages, "temperature": 1, "max_tokens": 96, **fields}
    answer = server.request("POST", "/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]


def test_schemas_side_by_side(server: Server) -> None:
    """Masked rows and free ones in one batch: what finishes is valid."""
    jsonschema = pytest.importorskip("jsonschema")
    asked: list[Any] = [*schemas(20), *[None] * 4]

    def ask(number: int) -> Any:
        schema = asked[number]
        if schema is None:
            return chat(server, seed=number, ignore_eos=True)
        format = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
        return chat(server, seed=number, response_format=format)

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(len(asked))))
    ended = 0
    for schema, answer in zip(asked, answers, strict=True):
        if schema is None:
            assert answer["finish_reason"] == "length"
        elif answer["finish_reason"] == "stop":
            validator = jsonschema.Draft202012Validator(schema)
            validator.validate(json.loads(answer["message"]["content"]))
            ended += 1
    assert ended >= 5, "hardly an answer was finished"


def test_a_pattern(server: Server) -> None:
    fields = {"structured_outputs": {"regex": "[a-f]{3}-[0-9]{4}"}, "n": 3}
    body = {"model": MODEL, "prompt": "x", "temperature": 1, "max_tokens": 40, **fields}
    answer = server.request("POST", "/v1/completions", body)
    assert answer.status == 200, answer.body
    texts = [choice["text"] for choice in answer.json["choices"]]
    assert len(texts) == 3 and all(re.fullmatch("[a-f]{3}-[0-9]{4}", text) for text in texts)


def test_a_named_tool(server: Server) -> None:
    """Arguments may be cut, in blanks as a rule; those that are whole are valid."""
    choice = {"type": "function", "function": {"name": "weather"}}
    with ThreadPoolExecutor(8) as pool:
        ask = partial(chat, server, tools=[TOOL], tool_choice=choice)
        answers = list(pool.map(lambda seed: ask(seed=seed), range(8)))
    whole = [answer for answer in answers if answer["finish_reason"] != "length"]
    assert whole, "every answer was cut"
    for answer in whole:
        [call] = answer["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")


@pytest.mark.parametrize("family", ["bert", "qwen3", "gemma3"])
def test_embeddings_are_the_cpus(family: str, tmp_path: Path) -> None:
    path = str(tiny_embedder(tmp_path / "model", family))
    texts = ["a short one", "a longer text, with several words in it", "x"]
    found = []
    for where in ("cpu", device()):
        with LLM(path, device=where, dtype="float32", task="embedding") as llm:
            outputs = llm.embed(texts, use_tqdm=False)
            found.append(np.array([output.outputs.embedding for output in outputs]))
    np.testing.assert_allclose(found[1], found[0], atol=2e-5)
