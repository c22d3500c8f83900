"""A worker without a model: deterministic tokens, and a strict check of the step protocol.

What a model computes at position p depends on all tokens up to p. Here that is one number, the
chain hash of those tokens, and the "paged KV cache" is an array of such numbers. Reading a context
through a block table must give exactly the chain of the slot's own tokens: wrong sharing, a missed
copy, a wrong prefix hit, a block freed or reused too early, or a token that was not there yet, all
show as a mismatch in the step in which a model would have read rubbish.

Steps are executed when they are given, results may be delivered any time later: just what a device
that executes in order and an engine that runs ahead see of each other.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from zlm.config import first_seen
from zlm.engine.grammar import GrammarMatcher, GrammarState, Words
from zlm.messages import (
    FINISH_EOS,
    FINISH_GRAMMAR,
    FINISH_LENGTH,
    FINISH_STOP_ID,
    ROW_OK,
    Execute,
    LogprobColumns,
    Masks,
    SamplingSpec,
    StepResult,
    Submit,
)

UNKNOWN = -1
MASK = 2**63 - 1


def chain(parent: int, token: int) -> int:
    """Return what position p holds, given what p - 1 holds and the token at p."""
    mixed = (parent ^ (token + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & MASK
    return (mixed ^ mixed >> 29) or 1


def next_token(
    value: int,
    num_outputs: int,
    sampling: SamplingSpec,
    vocab_size: int,
    words: Words | None = None,
) -> int:
    """Return the token that follows a context of chain value *value*; *words*: a grammar's mask."""
    token = chain(value ^ sampling.seed, 7) % vocab_size
    banned = np.frombuffer(sampling.banned_until_min, np.int32)
    allowed = np.ones(vocab_size, np.bool_)
    if words is not None:
        bits = np.unpackbits(words.view(np.uint8), count=vocab_size, bitorder="little")
        allowed &= bits.view(np.bool_)
    if num_outputs < sampling.min_tokens:
        allowed[banned] = False
    assert allowed.any(), "no token can follow"
    while not allowed[token]:
        token = (token + 1) % vocab_size
    return token


def generate_alone(
    submit: Submit,
    sample: int,
    vocab_size: int,
    eos_ids: Sequence[int],
    grammar: GrammarMatcher | None = None,
) -> tuple[list[int], int]:
    """Return the tokens and the finish code of a sequence, computed with no engine at all."""
    sampling = submit.sampling
    seeded = SamplingSpec(
        seed=(sampling.seed + sample) % 2**64,
        min_tokens=sampling.min_tokens,
        banned_until_min=sampling.banned_until_min,
    )
    value = 0
    for token in np.frombuffer(submit.token_ids, np.int32).tolist():
        value = chain(value, token)
    tokens: list[int] = []
    while len(tokens) < submit.max_tokens:
        words = None if grammar is None else grammar.words
        token = next_token(value, len(tokens), seeded, vocab_size, words)
        tokens.append(token)
        value = chain(value, token)
        if grammar is not None:
            grammar.advance(token)
        if len(tokens) >= sampling.min_tokens:
            if token in submit.stop_token_ids:
                return tokens, FINISH_STOP_ID
            if token in eos_ids and not submit.ignore_eos:
                return tokens, FINISH_EOS
        if grammar is not None and grammar.state is GrammarState.COMPLETE:
            return tokens, FINISH_GRAMMAR
    return tokens, FINISH_LENGTH


class FakeWorker:
    """Owns the slots' token tables and block tables and the simulated cache of every group."""

    def __init__(
        self,
        *,
        windows: Sequence[int],
        num_blocks: Sequence[int],
        block_size: int,
        num_slots: int,
        max_model_len: int,
        vocab_size: int,
        max_num_batched_tokens: int,
    ) -> None:
        width = -(-(max_model_len + 1) // block_size)
        self.windows = windows
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.budget = max_num_batched_tokens
        self.tokens = np.full((num_slots, max_model_len + 1), UNKNOWN, np.int64)
        self.values = np.zeros((num_slots, max_model_len + 1), np.int64)  # chain of the tokens
        self.tables = [np.zeros((num_slots, width), np.int64) for _ in windows]
        self.caches = [np.zeros((blocks, block_size), np.int64) for blocks in num_blocks]
        self.written = [np.zeros(cache.shape, np.int32) for cache in self.caches]  # token ids
        self.sampling: list[SamplingSpec | None] = [None] * num_slots
        self.num_prompt = [0] * num_slots
        self.last_sampled: dict[int, int] = {}  # by seed: the last position that was sampled
        self.failing: dict[int, int] = {}  # seeds whose rows fail, and with what status
        self.num_steps = 0
        self.num_computed = 0  # tokens

    def execute(self, message: Execute, masks: Masks | None = None) -> StepResult:
        """Apply *message*, check it, and return the step's result; *masks* if it is masked."""
        assert message.masked == (masks is not None)
        words = self._words(message.step, masks)
        assert message.step == self.num_steps
        self.num_steps += 1
        for join in message.joins:
            self._join(join.slot, join.token_ids, join.num_prompt_tokens, join.sampling)
        self._write_tables(message)
        for group, source, target in message.copies:
            assert source != target and source and target
            self.caches[group][target] = self.caches[group][source]
            self.written[group][target] = self.written[group][source]
        slots = np.frombuffer(message.slots, np.int32).tolist()
        starts = np.frombuffer(message.starts, np.int32).tolist()
        counts = np.frombuffer(message.counts, np.int32).tolist()
        samples = np.frombuffer(message.sample, np.uint8).tolist()
        rows = list(zip(slots, starts, counts, strict=True))
        assert rows and len(set(slots)) == len(slots) == len(samples)
        assert min(counts) > 0 and sum(counts) <= self.budget
        self.num_computed += sum(counts)
        self._write_caches(rows)
        for slot, start, count in rows:
            self._check_context(slot, start, start + count)
        sampling = [row for row, sample in zip(rows, samples, strict=True) if sample]
        tokens = [
            self._sample(slot, start + count, words.get(number))
            for number, (slot, start, count) in enumerate(sampling)
        ]
        return StepResult(
            step=message.step,
            token_ids=np.array(tokens, np.int32).tobytes(),
            status=self._status([slot for slot, _, _ in sampling]),
            logprobs=self._logprobs(sampling, tokens),
            prompt_logprobs=self._prompt_logprobs(rows),
            seconds=0.001,
        )

    # ------------------------------------------------------------------ tables

    def _join(self, slot: int, ids: bytes, num_prompt: int, sampling: SamplingSpec) -> None:
        tokens = np.frombuffer(ids, np.int32)
        self.tokens[slot] = UNKNOWN
        self.values[slot] = 0
        for table in self.tables:
            table[slot] = 0
        self.sampling[slot] = sampling
        self.num_prompt[slot] = num_prompt
        for position, token in enumerate(tokens.tolist()):
            self._store(slot, position, token)

    def _store(self, slot: int, position: int, token: int) -> None:
        assert 0 <= token < self.vocab_size
        parent = int(self.values[slot, position - 1]) if position else 0
        self.tokens[slot, position] = token
        self.values[slot, position] = chain(parent, token)

    def _write_tables(self, message: Execute) -> None:
        columns = (
            message.table_groups,
            message.table_slots,
            message.table_indices,
            message.table_blocks,
        )
        entries = list(
            zip(*(np.frombuffer(column, np.int32).tolist() for column in columns), strict=True)
        )
        places = [entry[:3] for entry in entries]
        assert len(set(places)) == len(places), "an entry is written twice in one step"
        for group, slot, index, block in entries:
            self.tables[group][slot, index] = block

    def _write_caches(self, rows: list[tuple[int, int, int]]) -> None:
        written = set()
        for slot, start, count in rows:
            positions = np.arange(start, start + count)
            assert (self.tokens[slot, positions] != UNKNOWN).all(), "input token is not there"
            for group, cache in enumerate(self.caches):
                blocks = self.tables[group][slot, positions // self.block_size]
                assert blocks.all(), "a token is written to the null block"
                offsets = positions % self.block_size
                places = set(zip([group] * count, blocks.tolist(), offsets.tolist(), strict=True))
                assert not places & written, "two rows write one place"
                written |= places
                cache[blocks, offsets] = self.values[slot, positions]
                self.written[group][blocks, offsets] = self.tokens[slot, positions]

    def _check_context(self, slot: int, start: int, end: int) -> None:
        for group, window in enumerate(self.windows):
            first = max(0, first_seen(start, window))
            positions = np.arange(first, end)
            blocks = self.tables[group][slot, positions // self.block_size]
            read = self.caches[group][blocks, positions % self.block_size]
            expected = self.values[slot, positions]
            assert (read == expected).all(), (
                f"slot {slot}, group {group}: positions "
                f"{positions[read != expected].tolist()} hold something else"
            )

    # ------------------------------------------------------------------ sampling

    def _spec(self, slot: int) -> SamplingSpec:
        spec = self.sampling[slot]
        assert spec is not None, "a row of a slot that nobody joined"
        return spec

    def _words(self, step: int, masks: Masks | None) -> dict[int, Words]:
        """Return the mask of each masked sampling row, by its number."""
        if masks is None:
            return {}
        assert masks.step == step, "the masks of another step"
        rows = np.frombuffer(masks.rows, np.int32).tolist()
        words = np.frombuffer(masks.words, np.int32)
        words = words.reshape(len(rows), -(-self.vocab_size // 32))
        return dict(zip(rows, words, strict=True))

    def _sample(self, slot: int, position: int, words: Words | None) -> int:
        spec = self._spec(slot)
        assert self.tokens[slot, position] == UNKNOWN, "a known token is sampled again"
        value = int(self.values[slot, position - 1])
        outputs = position - self.num_prompt[slot]
        token = next_token(value, outputs, spec, self.vocab_size, words)
        self._store(slot, position, token)
        self.last_sampled[spec.seed] = max(position, self.last_sampled.get(spec.seed, 0))
        return token

    def _status(self, slots: list[int]) -> bytes:
        status = [self.failing.get(self._spec(slot).seed, ROW_OK) for slot in slots]
        return bytes(status) if any(status) else b""

    def _logprobs(
        self, rows: list[tuple[int, int, int]], tokens: list[int]
    ) -> LogprobColumns | None:
        wanted = []
        for number, ((slot, start, count), token) in enumerate(zip(rows, tokens, strict=True)):
            most = self._spec(slot).logprobs
            if most >= 0:
                wanted.append((number, int(self.values[slot, start + count - 1]), token, most))
        return columns(wanted, self.vocab_size)

    def _prompt_logprobs(self, rows: list[tuple[int, int, int]]) -> LogprobColumns | None:
        wanted = []
        for number, (slot, start, count) in enumerate(rows):
            most = self._spec(slot).prompt_logprobs
            if most < 0:
                continue
            for position in range(start, min(start + count, self.num_prompt[slot] - 1)):
                token = int(self.tokens[slot, position + 1])
                wanted.append((number, int(self.values[slot, position]), token, most))
        return columns(wanted, self.vocab_size)


def logprob(value: int, token: int) -> float:
    """Return the log-probability of *token* after a context of chain value *value*."""
    return float(np.float32(-(chain(value, token) % 1000) / 100))


def columns(wanted: list[tuple[int, int, int, int]], vocab_size: int) -> LogprobColumns | None:
    """Return log-probabilities for each (row, chain value, token, number of alternatives)."""
    if not wanted:
        return None
    ids = [[token, *range(most)] for _, _, token, most in wanted]
    values = [
        [logprob(value, token) for token in line]
        for (_, value, _, _), line in zip(wanted, ids, strict=True)
    ]
    return LogprobColumns(
        rows=np.array([row for row, *_ in wanted], np.int32).tobytes(),
        counts=np.array([len(line) for line in ids], np.int32).tobytes(),
        ranks=np.ones(len(ids), np.int32).tobytes(),
        ids=np.array(list(itertools.chain(*ids)), np.int32).tobytes(),
        values=np.array(list(itertools.chain(*values)), np.float32).tobytes(),
    )
