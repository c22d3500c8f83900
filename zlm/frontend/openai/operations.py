"""The table behind /openapi.json: each route with its types, examples and errors. Pure data."""

from zlm.frontend.openai import chat, completions, fields
from zlm.frontend.openai.answer_types import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    DetokenizeAnswer,
    ModelCard,
    ModelList,
    TokenizeAnswer,
    VersionAnswer,
)
from zlm.frontend.openai.chat import ChatRequest
from zlm.frontend.openai.completions import CompletionRequest
from zlm.frontend.openai.field_schemas import (
    MESSAGES,
    RESPONSE_FORMAT,
    STREAM_OPTIONS,
    STRUCTURED_OUTPUTS,
    TOOL_CHOICE,
    TOOLS,
)
from zlm.frontend.openai.operation import ON_ANY, ON_MODEL, ON_POST, PROMPT, Operation
from zlm.frontend.openai.operations_pooling import POOLING
from zlm.frontend.openai.tokenize import DetokenizeRequest, TokenizeRequest

_GUIDED = tuple(name for name in CompletionRequest.__struct_fields__ if name.startswith("guided_"))
_CONVERSATION = [{"role": "user", "content": "What is the capital of France?"}]
_COMMON = {
    "stream_options": STREAM_OPTIONS,
    "response_format": RESPONSE_FORMAT,
    "structured_outputs": STRUCTURED_OUTPUTS,
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "capital",
        "description": "The capital of a country.",
        "parameters": {"type": "object", "properties": {"country": {"type": "string"}}},
    },
}
_COLOUR = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}}

OPERATIONS = (
    Operation(
        path="/v1/chat/completions",
        method="post",
        name="createChatCompletion",
        tag="Text",
        summary="Answer a conversation",
        request=ChatRequest,
        required=("messages",),
        hidden=_GUIDED,
        neutral={**fields.NEUTRAL, **chat.NEUTRAL},
        overrides={
            "messages": MESSAGES,
            "tools": TOOLS,
            "tool_choice": TOOL_CHOICE,
            **_COMMON,
        },
        examples={
            "question": {"messages": _CONVERSATION, "max_tokens": 50, "temperature": 0},
            "stream": {"messages": _CONVERSATION, "max_tokens": 50, "stream": True},
            "tools": {"messages": _CONVERSATION, "tools": [_TOOL], "tool_choice": "auto"},
            "schema": {
                "messages": _CONVERSATION,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "colour", "schema": _COLOUR},
                },
            },
        },
        answer=ChatCompletion,
        chunk=ChatCompletionChunk,
        errors=ON_POST,
    ),
    Operation(
        path="/v1/completions",
        method="post",
        name="createCompletion",
        tag="Text",
        summary="Continue a text",
        request=CompletionRequest,
        required=("prompt",),
        hidden=_GUIDED,
        neutral={**fields.NEUTRAL, **completions.NEUTRAL},
        overrides={
            "prompt": PROMPT,
            **_COMMON,
        },
        examples={
            "text": {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0},
            "scoring": {"prompt": "The sky is blue", "max_tokens": 0, "echo": True, "logprobs": 0},
        },
        answer=Completion,
        chunk=Completion,
        errors=ON_POST,
    ),
    *POOLING,
    Operation(
        path="/tokenize",
        method="post",
        name="tokenize",
        tag="Tokens",
        summary="The token ids of a prompt or a conversation",
        request=TokenizeRequest,
        alternatives=("prompt", "messages"),
        overrides={
            "messages": MESSAGES,
            "prompt": {"description": "A text."},
            "tools": TOOLS,
        },
        examples={"text": {"prompt": "The capital"}, "chat": {"messages": _CONVERSATION}},
        answer=TokenizeAnswer,
        errors=ON_POST,
    ),
    Operation(
        path="/detokenize",
        method="post",
        name="detokenize",
        tag="Tokens",
        summary="The text of token ids",
        request=DetokenizeRequest,
        required=("tokens",),
        examples={"ids": {"tokens": [504, 3575]}},
        answer=DetokenizeAnswer,
        errors=ON_POST,
    ),
    Operation(
        path="/v1/models",
        name="listModels",
        tag="Models",
        summary="All served names",
        answer=ModelList,
        errors=ON_MODEL,
    ),
    Operation(
        path="/v1/models/{model}",
        name="getModel",
        tag="Models",
        summary="One served name",
        path_parameters=(("model", "The served name."),),
        answer=ModelCard,
        errors=ON_MODEL,
    ),
    *(
        Operation(
            path=path,
            name=name,
            tag="Server",
            summary=summary,
            open=True,
            answer_description="Yes; the body is empty.",
            errors=("503", *ON_ANY),
        )
        for path, name, summary in (
            ("/health", "health", "Whether the engine can work"),
            ("/health/ready", "healthReady", "Whether requests can be served now"),
            ("/health/live", "healthLive", "Whether the process answers"),
            ("/ping", "ping", "The same as /health"),
        )
    ),
    Operation(
        path="/version",
        name="version",
        tag="Server",
        summary="zlm's version",
        open=True,
        answer=VersionAnswer,
        errors=ON_ANY,
    ),
    Operation(
        path="/metrics",
        name="metrics",
        tag="Server",
        summary="Measurements for Prometheus",
        media_type="text/plain",
        errors=("503", *ON_ANY),
    ),
    Operation(
        path="/openapi.json",
        name="openapi",
        tag="Server",
        summary="This document",
        answer=dict,
        errors=("503", *ON_ANY),
    ),
    Operation(
        path="/docs",
        name="docs",
        tag="Server",
        summary="This document as a page",
        open=True,
        media_type="text/html",
        errors=ON_ANY,
    ),
)
