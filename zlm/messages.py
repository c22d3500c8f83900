"""Every message that crosses a process boundary.

Rules. Commands are verbs, facts are nouns. Each struct says who sends it and who reads it. All are
``array_like`` with a small integer tag and travel as msgpack, one message a ZeroMQ frame; a union
per inbox (``ToFrontend``, ``ToTokenizer``, ``ToEngine``, ``ToWorker``, ``ToSupervisor``) types the
decoder. A message of a whole step carries *columns*: bytes of little-endian int32, int64, uint8 or
float32 arrays of one length, named in the comments.

Ids. ``request_id`` is one HTTP request, made by its front end: ``frontend_index << 48 | counter``.
``seq_id`` is one sequence (one sample of one prompt), made by the tokenizer (or ``LLM``):
``tokenizer_index << 48 | counter``; a prompt with n samples takes n ids in a row, so the owner of
any id is ``id >> 48``. The counter of a process that took another's place begins at its incarnation
``<< 36``: ids are never used twice. Client-supplied strings are never keys.

Imports nothing of zlm but the value types it carries.
"""

from zlm.process_messages import (
    WAITING as WAITING,
    Action as Action,
    Administer as Administer,
    Administered as Administered,
    Drain as Drain,
    Drained as Drained,
    Fatal as Fatal,
    KernelTime as KernelTime,
    Launch as Launch,
    Lost as Lost,
    Message as Message,
    NodeState as NodeState,
    Order as Order,
    PeerLost as PeerLost,
    PeerUp as PeerUp,
    Probe as Probe,
    Probed as Probed,
    Profile as Profile,
    Profiled as Profiled,
    Progress as Progress,
    Ready as Ready,
    ServerState as ServerState,
    Stop as Stop,
    Stuck as Stuck,
)
from zlm.request_messages import (
    Cancel as Cancel,
    ChatPrompt as ChatPrompt,
    Delta as Delta,
    Deltas as Deltas,
    Detokenize as Detokenize,
    DetokenizedText as DetokenizedText,
    Failed as Failed,
    Generate as Generate,
    Grammar as Grammar,
    Pool as Pool,
    Pooled as Pooled,
    Tokenize as Tokenize,
    TokenLogprob as TokenLogprob,
    Tokens as Tokens,
    ToolCallDelta as ToolCallDelta,
    ToolOptions as ToolOptions,
)

OWNER_SHIFT = 48
INCARNATION_SHIFT = 36
INCARNATIONS = 1 << (OWNER_SHIFT - INCARNATION_SHIFT)  # they are counted modulo this in ids

# Finish codes: the column ``finish`` of StepOutput.
RUNNING, FINISH_EOS, FINISH_STOP_ID, FINISH_LENGTH, FINISH_ABORT, FINISH_GRAMMAR = range(6)

# Row states: the column ``status`` of StepResult.
ROW_OK, ROW_NAN, ROW_ALL_MASKED = 0, 1, 2


def first_id(index: int, incarnation: int) -> int:
    """Return the id that a process begins to count from."""
    return index << OWNER_SHIFT | (incarnation % INCARNATIONS) << INCARNATION_SHIFT


def incarnation_of(any_id: int) -> int:
    """Return the incarnation, modulo INCARNATIONS, of the process that made an id."""
    return (any_id >> INCARNATION_SHIFT) % INCARNATIONS


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
    pool_tokens: bool = False  # of a model that is pooled: a vector for each token is wanted


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
    """Pooled vectors of some rows of a step. Part of StepResult and StepOutput.

    A row has one vector, or (``pool_tokens``) one for each token of its prompt, in order.
    """

    rows: bytes  # int32: index of the row it belongs to
    width: int  # elements of a vector that stands for a whole prompt
    values: bytes  # float32, the rows' vectors one after another
    sizes: bytes = b""  # int32: elements that each of ``rows`` has; empty: ``width`` each


class SequenceError(Message, frozen=True):
    """A sequence that ends in an error. Part of StepOutput; terminal for ``seq_id``."""

    seq_id: int
    status: int
    error_type: str
    message: str
    code: str | None = None
    retry_after_seconds: int | None = None


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
    times: list[tuple[int, float, float]] = []  # first tokens: row, when its sequence was first
    # given room, and now; time.monotonic(), seconds


class EngineReady(Message, frozen=True, tag=63):
    """Engine core → tokenizers (or LLM): sequences may be submitted now."""

    num_blocks: list[int]  # usable KV blocks of each group
    max_sequence_tokens: int  # longest sequence that the KV cache can ever hold
    device: str = ""
    dtype: str = ""
    incarnation: int = 0  # of the engine core: counts those that were before it


# ---------------------------------------------------------------------------- engine core ↔ worker


class Join(Message, frozen=True):
    """A sequence takes a slot (new, forked, or resumed after preemption). Part of Execute."""

    slot: int
    token_ids: bytes  # int32: all tokens known so far
    num_prompt_tokens: int
    sampling: SamplingSpec
    second_segment: int = 0  # where the second text of a pair begins; 0: there is one text
    pool_tokens: bool = False  # a vector for each token is wanted


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
    tokens: bytes = b""  # int32: in a pipeline, the token to compute of each of the first rows


class Masks(Message, frozen=True, tag=85):
    """Engine core → worker: the token masks of a step that is ``masked``, once, when all are known.

    Steps in between may have been sent before it.
    """

    step: int
    rows: bytes = b""  # int32: sampling rows of the step; the others are not masked
    words: bytes = b""  # int32: ceil(V / 32) a row; bit i % 32 of word i // 32: id i is allowed


class StepResult(Message, frozen=True, tag=81):
    """Worker → engine core: what a step sampled, in the order of its sampling rows.

    Of several workers the first of those that sample answers.
    """

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
    address: str = ""  # of its inbox, if it is on another machine than the engine core


ToFrontend = (
    Launch
    | Administer
    | Administered
    | ServerState
    | Drain
    | Stop
    | PeerUp
    | PeerLost
    | Probe
    | Deltas
    | Failed
    | Tokens
    | DetokenizedText
    | Pooled
)
ToTokenizer = (
    Launch
    | Stop
    | PeerUp
    | PeerLost
    | Generate
    | Pool
    | Cancel
    | Tokenize
    | Detokenize
    | StepOutput
    | EngineReady
)
ToEngine = (
    Launch
    | Administer
    | ServerState
    | Stop
    | PeerUp
    | PeerLost
    | Submit
    | Abort
    | TokenBytes
    | StepResult
    | WorkerReady
)
ToWorker = Launch | Stop | Execute | Masks | Profile
ToSupervisor = Ready | Progress | Fatal | Drained | Probed | Profiled | Administer | Administered
