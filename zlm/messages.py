"""Every message that crosses a process boundary.

Rules. Commands are verbs, facts are nouns. Each struct says who sends it and who reads it. All are
``array_like`` with a small integer tag and travel as msgpack, one message a ZeroMQ frame; a union
per inbox (``ToFrontend``, ``ToTokenizer``, ``ToEngine``, ``ToWorker``, ``ToSupervisor``) types the
decoder. A message of a whole step carries *columns*: bytes of little-endian int32, int64, uint8 or
float32 arrays of one length, named in the comments.

Ids. ``request_id`` is one HTTP request, made by its front end: ``frontend_index << 48 | counter``.
``seq_id`` is one sequence (one sample of one prompt), made by the tokenizer (or ``LLM``):
``tokenizer_index << 48 | counter``; a prompt with n samples takes n ids in a row, so the owner of
any id is ``id >> 48``. Client-supplied strings are never keys.

Imports nothing of zlm but the value types it carries.
"""

from typing import Any

from zlm.pooling_params import PoolingParams
from zlm.process_messages import (
    Drain as Drain,
    Drained as Drained,
    Fatal as Fatal,
    KernelTime as KernelTime,
    Launch as Launch,
    Message as Message,
    Profile as Profile,
    Profiled as Profiled,
    Progress as Progress,
    Ready as Ready,
    ServerState as ServerState,
    Stop as Stop,
)
from zlm.sampling_params import SamplingParams

OWNER_SHIFT = 48

# Finish codes: the column ``finish`` of StepOutput.
RUNNING, FINISH_EOS, FINISH_STOP_ID, FINISH_LENGTH, FINISH_ABORT, FINISH_GRAMMAR = range(6)

# Row states: the column ``status`` of StepResult.
ROW_OK, ROW_NAN, ROW_ALL_MASKED = 0, 1, 2


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
    JSON list of strings), lark (Lark, or EBNF as GBNF writes it).
    """

    kind: str
    text: str = ""


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
    grammar: Grammar | None = None  # what the output must be; else ``params`` may say it


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
    prompts: list[str | list[int]]
    params: PoolingParams
    seconds: list[str] = []  # of pairs (cross-encoders): the second text of each of ``prompts``
    add_special_tokens: bool = True
    priority: int = 0


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
    prompt_logprobs: list[TokenLogprob] | None = None  # in a choice's first delta, when asked
    reasoning: str = ""  # new text of the thoughts, which comes before ``text``
    tool_calls: list[ToolCallDelta] = []


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


# ------------------------------------------------------------------------- tokenizer ↔ engine core


class SamplingSpec(Message, frozen=True):
    """Sampling of one sequence as the worker needs it: every value given, every id checked.

    Part of Submit and Join. ``seed`` is the sequence's own: never shared by the samples of a
    prompt. Ids are int32 columns.
    """

    seed: int  # unsigned 64-bit
    temperature: float = 1.0  # 0.0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int = -1  # alternatives to report beside the sampled token; -1: report nothing
    prompt_logprobs: int = -1
    min_tokens: int = 0
    banned_until_min: bytes = b""  # int32: EOS and stop ids, masked before min_tokens
    bias_ids: bytes = b""  # int32
    bias_values: bytes = b""  # float32
    allowed_ids: bytes = b""  # int32; empty: all
    bad_words: list[bytes] = []  # each int32: a word's tokens


class TokenBytes(Message, frozen=True, tag=68):
    """Tokenizer (or LLM) → engine core: what each token id stands for; before its first grammar.

    Token i of the vocabulary is ``data[ends[i - 1] : ends[i]]``; ids that follow stand for nothing.
    """

    data: bytes
    ends: bytes  # int32
    special_ids: bytes  # int32: control tokens, which no grammar takes for text
    eos_ids: bytes  # int32: those that end a text


class Submit(Message, frozen=True, tag=60):
    """Tokenizer (or LLM) → engine core: one prompt to be continued n times.

    Sequence i of the n has id ``seq_id + i`` and, as its seed, ``sampling.seed + i`` modulo 2**64.
    """

    seq_id: int
    arrival: float  # time.monotonic(), seconds
    token_ids: bytes  # int32: the prompt
    max_tokens: int  # at least 1 unless prompt_logprobs is asked; prompt + max fits the context
    sampling: SamplingSpec
    n: int = 1
    stop_token_ids: list[int] = []  # the client's own; EOS ids are the model's
    ignore_eos: bool = False
    priority: int = 0
    cache_salt: bytes = b""
    second_segment: int = 0  # where the second text of a pair begins; 0: there is one text
    grammar: Grammar | None = None  # checked: it compiles


class Abort(Message, frozen=True, tag=61):
    """Tokenizer (or LLM) → engine core: end these sequences. Each still gets its terminal row."""

    seq_ids: list[int]


class LogprobColumns(Message, frozen=True):
    """Log-probabilities of some rows of a step. Part of StepResult and StepOutput.

    Row k of the columns ``rows``/``counts``/``ranks`` describes one token; its ``counts[k]``
    entries stand one after another in ``ids`` and ``values``: first the token itself, then the
    likeliest alternatives in order. Values are natural logs of the raw distribution, finite.
    """

    rows: bytes  # int32: index of the row of the step it belongs to
    counts: bytes  # int32
    ranks: bytes  # int32: of the token itself, 1 is the likeliest
    ids: bytes  # int32
    values: bytes  # float32


class PooledColumns(Message, frozen=True):
    """Pooled vectors of some rows of a step. Part of StepResult and StepOutput."""

    rows: bytes  # int32: index of the row it belongs to
    width: int  # elements of a vector
    values: bytes  # float32, the vectors one after another


class SequenceError(Message, frozen=True):
    """A sequence that ends in an error. Part of StepOutput; terminal for ``seq_id``."""

    seq_id: int
    status: int
    error_type: str
    message: str
    code: str | None = None


class StepOutput(Message, frozen=True, tag=62):
    """Engine core → tokenizer (or LLM): all news of its sequences from one step.

    Columns have one entry a row; a row is one sequence's news: a token (or -1 for none), and
    whether it is over. A row with ``finish`` other than RUNNING is terminal, and so is every
    entry of ``errors``: each submitted sequence gets exactly one of the two.
    """

    seq_ids: bytes  # int64
    token_ids: bytes  # int32; -1: no token in this row
    finish: bytes  # uint8: RUNNING, FINISH_EOS, ...
    cached: list[tuple[int, int]] = []  # (row, prompt tokens found in the prefix cache): first rows
    logprobs: LogprobColumns | None = None  # rows index this message's rows
    prompt_logprobs: LogprobColumns | None = None  # rows index this message's rows; prompt
    # positions 1.. stand in order, perhaps over several messages (chunks), and are told once a
    # prompt: by its first sample, or by the next one if that ends before the prompt is computed
    errors: list[SequenceError] = []
    pooled: PooledColumns | None = None  # rows index this message's rows


class EngineReady(Message, frozen=True, tag=63):
    """Engine core → tokenizers (or LLM): sequences may be submitted now."""

    num_blocks: list[int]  # usable KV blocks of each group
    max_sequence_tokens: int  # longest sequence that the KV cache can ever hold
    device: str = ""
    dtype: str = ""


class EngineStats(Message, frozen=True, tag=64):
    """Engine core → front ends, several times a second while it works and once when it goes idle.

    Counters only ever grow. Histograms are [count per bucket..., over the last bucket] and a sum;
    their buckets are in ``zlm.metrics``.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0  # 0..1, the fullest group
    num_blocks: int = 0
    block_size_tokens: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0  # tokens
    prefix_cache_hits: int = 0  # tokens
    preemptions: int = 0
    success: dict[str, int] = {}  # by finished_reason: stop, length, abort, error
    histograms: dict[str, tuple[list[int], float]] = {}


# ---------------------------------------------------------------------------- engine core ↔ worker


class Join(Message, frozen=True):
    """A sequence takes a slot (new, forked, or resumed after preemption). Part of Execute."""

    slot: int
    token_ids: bytes  # int32: all tokens known so far
    num_prompt_tokens: int
    sampling: SamplingSpec
    second_segment: int = 0  # where the second text of a pair begins; 0: there is one text


class Execute(Message, frozen=True, tag=80):
    """Engine core → worker: one step. Only changes are carried; the worker keeps the tables.

    Applied in order: joins, block-table entries, block copies, then the forward pass of all rows.
    A row computes ``counts`` tokens of its slot from position ``starts``; their ids stand in the
    slot's token table (joined with it, or sampled by an earlier step, perhaps one that has not
    ended yet). A row with ``sample`` set draws the token that follows its last one, stores it in
    the table, and reports it.
    """

    step: int
    slots: bytes  # int32, one a row; prefill rows and decode rows in any order
    starts: bytes  # int32: position of the first token to compute
    counts: bytes  # int32: tokens to compute
    sample: bytes  # uint8
    joins: list[Join] = []
    table_groups: bytes = b""  # int32 ┐ block-table entries: in group g, the table row of slot s
    table_slots: bytes = b""  # int32  │ has at index i (tokens i * block_size ...) block b;
    table_indices: bytes = b""  # int32│ block 0 of every group is the null block
    table_blocks: bytes = b""  # int32 ┘
    copies: list[tuple[int, int, int]] = []  # (group, from block, to block)
    masked: bool = False  # Masks of this step follow: sampling waits for them


class Masks(Message, frozen=True, tag=85):
    """Engine core → worker: the token masks of a step that is ``masked``, once, when all are known.

    Steps in between may have been sent before it.
    """

    step: int
    rows: bytes = b""  # int32: sampling rows of the step; the others are not masked
    words: bytes = b""  # int32: ceil(V / 32) a row; bit i % 32 of word i // 32: id i is allowed


class StepResult(Message, frozen=True, tag=81):
    """Worker rank 0 → engine core: what a step sampled, in the order of its sampling rows."""

    step: int
    token_ids: bytes  # int32, one a sampling row
    status: bytes = b""  # uint8, one a sampling row; empty: all ROW_OK
    logprobs: LogprobColumns | None = None  # rows index the sampling rows
    prompt_logprobs: LogprobColumns | None = None  # rows index all rows of the step
    seconds: float = 0.0  # time the worker spent on the step
    pooled: PooledColumns | None = None  # of rows that end a prompt; rows index all of the step


class WorkerReady(Message, frozen=True, tag=82):
    """Worker → engine core: weights are loaded, the KV cache is there, a step has been run."""

    rank: int
    num_blocks: list[int]  # of each group, the null block included
    device: str
    dtype: str


ToFrontend = (
    Launch
    | ServerState
    | Drain
    | Stop
    | Deltas
    | Failed
    | Tokens
    | DetokenizedText
    | Pooled
    | EngineStats
)
ToTokenizer = (
    Launch | Stop | Generate | Pool | Cancel | Tokenize | Detokenize | StepOutput | EngineReady
)
ToEngine = Launch | Stop | Submit | Abort | TokenBytes | StepResult | WorkerReady
ToWorker = Launch | Stop | Execute | Masks | Profile
ToSupervisor = Ready | Progress | Fatal | Drained | Profiled
ToLLM = Ready | Progress | Fatal | StepOutput | EngineReady  # the offline LLM is both owners
