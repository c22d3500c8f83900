"""A sequence: one sample of one prompt, from submission to its terminal row.

``Sequence`` is a record; the scheduler owns every one of them and is the only one to change it.
There is no prefill or decode kind: a sequence has ``num_tokens`` tokens (some perhaps placeholders
for tokens that a step in flight will sample) and ``num_computed`` of them are in the KV cache or
on their way there. While a sequence has a slot, its tokens and both numbers live in the slot's
columns (``zlm.engine.slots``), where a whole batch is advanced at once; else they live here.
"""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt

from zlm.engine.grammar import GrammarMatcher
from zlm.messages import Join, SamplingSpec, Submit

SEED_MODULUS = 2**64

Order = tuple[int, float, int]


class State(enum.Enum):
    """Where a sequence is.

        HELD ──▶ WAITING ◀──▶ RUNNING ──▶ FINISHED        (any state ──▶ FINISHED by an abort)

    HELD: a sample that waits until its prompt was computed by another.  WAITING: in the queue, new
    or preempted.  RUNNING: has a slot and blocks.  FINISHED: its terminal row was made.
    """

    HELD = 0
    WAITING = 1
    RUNNING = 2
    FINISHED = 3


class Sequence:
    """One sequence. Fields are grouped by who sets them and how long they live."""

    __slots__ = (
        "arrival",
        "counts_prompt",
        "first_token_at",
        "grammar",
        "held",
        "ignore_eos",
        "in_flight",
        "keys",
        "last_token_at",
        "limit",
        "min_length",
        "num_cached",
        "num_prompt",
        "num_published",
        "order",
        "parent",
        "pool_tokens",
        "prompt_logprobs_sent",
        "prompt_step",
        "root",
        "sampling",
        "second_segment",
        "seq_id",
        "slot",
        "started_at",
        "state",
        "stop_ids",
        "tokens",
    )

    def __init__(self, submit: Submit, sample: int, order: Order, root: bytes) -> None:
        """Make sample number *sample* of *submit*; *root* begins its chain of block keys."""
        tokens = np.frombuffer(submit.token_ids, np.int32)
        # Given: what was asked for.
        self.seq_id = submit.seq_id + sample
        self.arrival = submit.arrival
        self.order = order  # sorts by who goes first
        self.num_prompt = len(tokens)
        self.limit = len(tokens) + submit.max_tokens  # tokens it has at most
        self.sampling: SamplingSpec = submit.sampling
        self.min_length = len(tokens) + submit.sampling.min_tokens
        self.stop_ids = tuple(submit.stop_token_ids)
        self.ignore_eos = submit.ignore_eos
        self.root = root
        self.grammar: GrammarMatcher | None = None  # told every token, whatever state it is in
        self.second_segment = submit.second_segment
        self.pool_tokens = submit.pool_tokens
        # From submission to the end.
        self.state = State.WAITING
        self.tokens: npt.NDArray[np.int32] = tokens  # all known ones, while it has no slot
        self.keys: list[bytes] = []  # of its leading full blocks of known tokens
        self.num_cached = -1  # prompt tokens found in the prefix cache; -1: never scheduled
        self.prompt_logprobs_sent = 1  # prompt positions reported so far (the first has none)
        self.parent: Sequence | None = None  # the sample that computes this one's prompt
        self.held: list[Sequence] = []  # samples that wait for this one to compute the prompt
        self.counts_prompt = sample == 0  # statistics count a prompt once, by one of its samples
        # While it has a slot.
        self.slot = -1
        self.num_published = 0  # leading blocks that the prefix cache knows
        self.prompt_step = -1  # step that computes the last prompt token; -1: not planned yet
        # While it has none but steps in flight still compute rows of it.
        self.in_flight = 0
        # Times, seconds on the clock of ``now``; -1.0: not yet.
        self.started_at = -1.0
        self.first_token_at = -1.0
        self.last_token_at = -1.0

    def join(self, slot: int, sampling: SamplingSpec) -> Join:
        """Return the message of its taking *slot*, to be sampled as *sampling* says."""
        tokens = self.tokens.tobytes()
        return Join(slot, tokens, self.num_prompt, sampling, self.second_segment, self.pool_tokens)

    @property
    def reads_cache(self) -> bool:
        """Whether cached blocks may stand in for computing.

        Not while prompt logprobs are due, nor where something of every token is wanted.
        """
        told = self.sampling.prompt_logprobs < 0 or self.prompt_logprobs_sent >= self.num_prompt
        return told and not self.pool_tokens
