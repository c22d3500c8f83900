"""POST /tokenize and /detokenize, in vLLM's shapes."""

from typing import Any

import msgspec

from zlm.errors import BadRequest
from zlm.frontend.openai.body import BodyDecoder
from zlm.frontend.openai.chat import chat_prompt
from zlm.frontend.openai.tools import tool_request
from zlm.messages import Detokenize, DetokenizedText, Tokenize, Tokens


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of /tokenize: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None  # a prompt: yes; a chat: no
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None  # of a chat, as its template writes them
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of /detokenize."""

    model: str | None = None
    tokens: list[int] | None = None


tokenize_decoder = BodyDecoder(TokenizeRequest)
detokenize_decoder = BodyDecoder(DetokenizeRequest)


def tokenize(request: TokenizeRequest, request_id: int, *, strict: bool) -> Tokenize:
    """Return the command for the tokenizer; raise BadRequest if neither or both forms are given."""
    if (request.prompt is None) == (request.messages is None):
        raise BadRequest("give either prompt or messages", param="prompt")
    if request.prompt is not None:
        return Tokenize(
            request_id=request_id,
            prompt=request.prompt,
            add_special_tokens=request.add_special_tokens is not False,
            return_token_strings=bool(request.return_token_strs),
        )
    tools = tool_request(request.tools, None, parallel=True).tools
    return Tokenize(
        request_id=request_id,
        chat=chat_prompt(request, strict=strict, tools=tools, documents=request.documents),
        add_special_tokens=bool(request.add_special_tokens),
        return_token_strings=bool(request.return_token_strs),
    )


def detokenize(request: DetokenizeRequest, request_id: int) -> Detokenize:
    """Return the command for the tokenizer."""
    if request.tokens is None:
        raise BadRequest("tokens is required", param="tokens")
    return Detokenize(request_id=request_id, token_ids=request.tokens)


def tokenize_answer(tokens: Tokens, max_model_len: int) -> dict[str, Any]:
    """Return the body of the answer to /tokenize."""
    return {
        "count": len(tokens.token_ids),
        "max_model_len": max_model_len,
        "tokens": tokens.token_ids,
        "token_strs": tokens.token_strings,
    }


def detokenize_answer(text: DetokenizedText) -> dict[str, Any]:
    """Return the body of the answer to /detokenize."""
    return {"prompt": text.text}
