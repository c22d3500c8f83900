"""Messages between front ends and tokenizers: what clients ask, and what they are answered.

They are part of ``zlm.messages``, from where everybody takes them; see there for the rules.
"""

from typing import Any

from zlm.pooling_params import PoolingParams
from zlm.process_messages import Message
from zlm.sampling_params import SamplingParams

# ---------------------------------------------------------------------------- front end → tokenizer


class ChatPrompt(Message, frozen=True):
    """A conversation to be rendered by the chat template. Part of Generate and Tokenize."""

    messages: list[dict[str, Any]]  # content already a string or a list of {"type": "text"} parts
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = False


class ToolOptions(Message, frozen=True):
    """How tools may be called in an answer. Part of Generate."""

    names: list[str]  # of the functions that may be called; with ``named`` the one that must be
    choice: str = "auto"  # auto, required or named; the last two need a grammar to be kept
    parallel: bool = True  # more than one call an answer


class Grammar(Message, frozen=True):
    """What an output must be: the language that the grammar compiler reads. Part of Generate and
    Submit.

    ``kind`` and ``text``: json_object (no text), json_schema (the schema as JSON), regex, choice (a
    JSON list of strings), lark (Lark, or EBNF as GBNF writes it). ``frame``: Lark of the whole
    output, in which ``@answer`` stands for all that; empty: there is nothing around it.
    """

    kind: str
    text: str = ""
    frame: str = ""


class Generate(Message, frozen=True, tag=20):
    """Front end → tokenizer: one HTTP request for text."""

    request_id: int
    arrival: float  # time.monotonic() when the request was complete, seconds
    prompts: list[str | list[int]]  # empty when ``chat`` is set
    params: SamplingParams
    chat: ChatPrompt | None = None
    stream: bool = False  # deltas as they come; else one Delta a choice at its end
    echo: bool = False  # the prompt's text (chat: that of a continued message) precedes the output
    add_special_tokens: bool = True
    return_token_ids: bool = False
    priority: int = 0  # lower runs earlier under --scheduling-policy priority
    cache_salt: str = ""  # requests share prefix-cache blocks only with equal salts
    split_reasoning: bool = False  # tell reasoning apart from the text, where the model thinks
    drop_reasoning: bool = False  # and then do not tell it at all
    tools: ToolOptions | None = None  # tell tool calls apart from the text; None: all is text
    grammar: Grammar | None = None  # what the output must be; else ``params`` may say it. With
    # tools and choice auto: the list of calls that those in the output must be of
    max_tokens_field: str = "max_tokens"  # what the client calls it, for errors


class Cancel(Message, frozen=True, tag=21):
    """Front end → tokenizer: the client is gone, or the answer is no longer wanted."""

    request_id: int


class Tokenize(Message, frozen=True, tag=22):
    """Front end → tokenizer: POST /tokenize. Answered by Tokens."""

    request_id: int
    prompt: str = ""
    chat: ChatPrompt | None = None
    add_special_tokens: bool = True
    return_token_strings: bool = False


class Detokenize(Message, frozen=True, tag=23):
    """Front end → tokenizer: POST /detokenize. Answered by DetokenizedText."""

    request_id: int
    token_ids: list[int]


class Pool(Message, frozen=True, tag=24):
    """Front end → tokenizer: one HTTP request for vectors or scores. Answered by Pooled."""

    request_id: int
    arrival: float  # time.monotonic() when the request was complete, seconds
    prompts: list[str | list[int]]  # empty when ``chat`` is set
    params: PoolingParams
    seconds: list[str] = []  # of pairs (cross-encoders): the second text of each of ``prompts``
    add_special_tokens: bool = True
    priority: int = 0
    chat: ChatPrompt | None = None  # the one input is a conversation
    names: list[str] = []  # what errors call each of ``prompts``; empty: input


# ---------------------------------------------------------------------------- tokenizer → front end


class TokenLogprob(Message, frozen=True):
    """One token with its log-probability and the likeliest alternatives. Part of Delta."""

    token_id: int
    token: str  # special tokens by name; undecodable bytes as U+FFFD
    token_bytes: bytes
    logprob: float | None  # natural log; None for a prompt's first token
    top: list[tuple[int, str, bytes, float]] = []  # id, token, bytes, logprob; likeliest first
    rank: int = 0  # of the token itself, 1 is the likeliest; 0: not known


class ToolCallDelta(Message, frozen=True):
    """New text of one tool call. Part of Delta. A call's first one has its id and name.

    Joined ``arguments`` of a call are the JSON of an object, if the call was completed.
    """

    index: int  # of the call in the answer
    arguments: str = ""
    id: str | None = None
    name: str | None = None


class Delta(Message, frozen=True):
    """New text of one choice. Part of Deltas. The one with ``finish_reason`` set is the last.

    ``index`` is prompt_index * n + sample. Joined ``text`` over all deltas of a choice is its
    text. With echo, the first delta of a choice starts with the prompt's text and its
    ``logprobs`` (when asked) with the prompt's tokens.
    """

    request_id: int
    index: int
    text: str
    num_prompt_tokens: int  # of this choice's prompt
    num_cached_tokens: int  # of those, found in the prefix cache
    num_output_tokens: int  # of this choice so far
    finish_reason: str | None = None  # stop, length, tool_calls, abort
    stop_reason: int | str | None = None  # the stop string or stop id that ended it
    token_ids: list[int] | None = None  # new ones, when return_token_ids
    prompt_token_ids: list[int] | None = None  # in a choice's first delta, when return_token_ids
    logprobs: list[TokenLogprob] | None = None  # of the tokens this delta accounts for
    text_offsets: list[int] = []  # of each of those: characters of the choice's text before it
    prompt_logprobs: list[TokenLogprob] | None = None  # in a choice's first delta, when asked
    reasoning: str = ""  # new text of the thoughts, which comes before ``text``
    tool_calls: list[ToolCallDelta] = []
    times: tuple[float, float] | None = None  # of a choice, in its last delta: when it was first
    # given room, and when its first token was known; time.monotonic(), seconds


class Deltas(Message, frozen=True, tag=40):
    """Tokenizer → front end: one batch of new text."""

    items: list[Delta]


class Failed(Message, frozen=True, tag=41):
    """Tokenizer → front end: a request is over with an error (terminal for the whole request)."""

    request_id: int
    status: int
    error_type: str
    message: str
    code: str | None = None
    param: str | None = None
    retry_after_seconds: int | None = None


class Tokens(Message, frozen=True, tag=42):
    """Tokenizer → front end: the answer to Tokenize (terminal)."""

    request_id: int
    token_ids: list[int]
    token_strings: list[str] | None = None


class DetokenizedText(Message, frozen=True, tag=43):
    """Tokenizer → front end: the answer to Detokenize (terminal)."""

    request_id: int
    text: str


class Pooled(Message, frozen=True, tag=44):
    """Tokenizer → front end: the answer to Pool (terminal): all its vectors, in order."""

    request_id: int
    vectors: list[bytes]  # float32, one for each prompt
    prompts: list[list[int]]  # the token ids they were made of
    per_token: bool = False  # each of ``vectors`` is one vector a token, one after another
    times: tuple[float, float] | None = None  # when the first text was given room, and its vector
    # known; time.monotonic(), seconds
