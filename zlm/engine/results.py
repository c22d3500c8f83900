"""Takes in what a step sampled: tokens into the columns, who is over, and the news of it.

Owns nothing: writes the columns of the scheduler's slots (``known``, ``tokens``, times) and calls
back to end sequences. Steady decode is array work only; Python runs for rows that end a sequence,
for prefill rows, and for rows whose sequence lost its slot while the step was in flight.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from zlm.engine.grammar import GrammarState
from zlm.engine.news import NO_TOKEN, Int32s, News, chosen_vectors, renumber, vectors_of
from zlm.engine.plan import Indices, Plan
from zlm.engine.request import Sequence, State
from zlm.engine.slots import SlotTable
from zlm.engine.stats import ERROR, Statistics
from zlm.errors import BadRequest, ModelError, ZlmError
from zlm.messages import (
    FINISH_EOS,
    FINISH_GRAMMAR,
    FINISH_LENGTH,
    FINISH_STOP_ID,
    ROW_ALL_MASKED,
    ROW_NAN,
    ROW_OK,
    RUNNING,
    LogprobColumns,
    PooledColumns,
    StepResult,
)


class ResultReader:
    """Reads results of steps into the slots."""

    def __init__(
        self,
        slots: SlotTable,
        statistics: Statistics,
        eos_ids: tuple[int, ...],
        vocab_size: int,
        finish: Callable[[Sequence, int, float], None],
    ) -> None:
        """*finish* ends a sequence: called with its finish code (or ERROR) and the time."""
        self._slots = slots
        self._statistics = statistics
        self._eos_ids = frozenset(eos_ids)
        self._is_eos = np.zeros(vocab_size, np.bool_)
        self._is_eos[[token for token in eos_ids if token < vocab_size]] = True
        self._finish = finish

    def read(self, plan: Plan, result: StepResult, now: float) -> News:
        """Take in *result*, which is that of *plan*."""
        news = News()
        ids = np.frombuffer(result.token_ids, np.int32)
        good: Indices | None = None  # sampling rows with a token for a slot; None: all
        placed = np.arange(len(ids))  # the row of the news of each sampling row
        failed: list[int] = []
        if plan.departed or result.status:
            held = ~np.isin(plan.sample_slots, list(plan.departed))
            valid = np.ones(len(ids), np.bool_)
            if result.status:
                valid = np.frombuffer(result.status, np.uint8) == ROW_OK
            good = np.flatnonzero(held & valid)
            failed = np.flatnonzero(held & ~valid).tolist()
            placed.fill(-1)
            placed[good] = np.arange(len(good))
        described = self._count_prompt_logprobs(plan, result)
        self._read_slots(plan, ids, good, news, now)
        for row in failed:
            sequence = self._slots.sequences[int(plan.sample_slots[row])]
            self._fail(sequence, result.status[row], news, now)
        if plan.departed:
            self._read_departed(plan, result, ids, placed, news, now)
        if result.pooled is not None:
            self._read_pooled(plan, result.pooled, news, now)
        elif plan.prefills:
            self._read_prefills(plan, result.prompt_logprobs, described, placed, news, now)
        if result.logprobs is not None:
            news.logprobs = renumber(result.logprobs, placed)
        return news

    # ------------------------------------------------------------------ rows of slots

    def _read_slots(
        self, plan: Plan, ids: Int32s, good: Indices | None, news: News, now: float
    ) -> None:
        """Store the tokens of sampling rows *good*, tell them, and end what they complete."""
        slots, ends, num_decodes = plan.sample_slots, plan.sample_ends, plan.num_decodes
        if good is not None:
            slots, ends, ids = slots[good], ends[good], ids[good]
            num_decodes = int(np.searchsorted(good, num_decodes))
        columns = self._slots
        columns.tokens[slots, ends] = ids
        columns.known[slots] = ends + 1
        self._statistics.next_tokens(now - columns.last_token_at[slots[:num_decodes]])
        self._statistics.generation_tokens += len(slots)
        for row in plan.prefills:
            if row.samples and columns.sequences.get(row.slot) is row.sequence:
                self._time_token(row.sequence, float(columns.last_token_at[row.slot]), now)
        columns.last_token_at[slots] = now
        finish = np.zeros(len(slots), np.uint8)
        news.add(columns.seq_ids[slots], ids, finish)
        self._end(slots, ends, ids, finish, news, now)

    def _end(
        self,
        slots: Indices,
        ends: Indices,
        ids: Int32s,
        finish: npt.NDArray[np.uint8],
        news: News,
        now: float,
    ) -> None:
        """End the sequences that the tokens *ids* at *ends* complete; fill in *finish*."""
        columns = self._slots
        over = ends + 1 >= columns.limit[slots]
        over |= self._is_eos[ids] & columns.stops_on_eos[slots]
        if columns.num_with_stop_ids:
            over |= columns.hits_stop_id(slots, ids)
        if columns.num_with_grammar:
            over |= self._advance_grammars(slots, ids)
        for row in np.flatnonzero(over).tolist():
            sequence = columns.sequences[int(slots[row])]
            code = self._finish_code(sequence, int(ids[row]), int(ends[row]) + 1)
            if code == ERROR:
                self._fail_grammar(sequence, news, now)
            elif code != RUNNING:
                finish[row] = code
                self._finish(sequence, code, now)

    def _advance_grammars(self, slots: Indices, ids: Int32s) -> npt.NDArray[np.bool_]:
        """Tell grammars their tokens; return which rows are at an end of them."""
        over = np.zeros(len(slots), np.bool_)
        for row in np.flatnonzero(self._slots.has_grammar[slots]).tolist():
            grammar = self._slots.sequences[int(slots[row])].grammar
            assert grammar is not None, "the slot's column says that there is one"
            grammar.advance(int(ids[row]))
            over[row] = grammar.state is not GrammarState.OPEN
        return over

    def _finish_code(self, sequence: Sequence, token: int, length: int) -> int:
        """Return how *token*, which made *sequence* *length* tokens long, ends it, or RUNNING.

        ERROR: its grammar cannot go on. The end of a grammar counts before ``min_length`` too, as
        nothing can follow it.
        """
        if length >= sequence.min_length:
            if token in sequence.stop_ids:
                return FINISH_STOP_ID
            if token in self._eos_ids and not sequence.ignore_eos:
                return FINISH_EOS
        state = GrammarState.OPEN if sequence.grammar is None else sequence.grammar.state
        if state is GrammarState.COMPLETE:
            return FINISH_GRAMMAR
        if length >= sequence.limit:
            return FINISH_LENGTH
        return ERROR if state is GrammarState.FAILED else RUNNING

    def _fail(self, sequence: Sequence, status: int, news: News, now: float) -> None:
        error: ZlmError
        if status == ROW_ALL_MASKED:
            error = BadRequest(
                "no token can follow: logit_bias, allowed_token_ids, bad_words, min_tokens and the "
                "grammar leave no candidate"
            )
        else:
            error = ModelError("the model computed values that are not numbers for this request")
        self._finish(sequence, ERROR, now)
        news.add_error(sequence.seq_id, error)

    def _fail_grammar(self, sequence: Sequence, news: News, now: float) -> None:
        assert sequence.grammar is not None, "only a grammar fails so"
        problem = f"the grammar cannot be followed any further: {sequence.grammar.problem}"
        self._finish(sequence, ERROR, now)
        news.add_error(sequence.seq_id, BadRequest(problem, param="structured_outputs"))

    # ------------------------------------------------------------------ prefill rows

    def _time_token(self, sequence: Sequence, last_token_at: float, now: float) -> None:
        if sequence.first_token_at < 0.0:
            sequence.first_token_at = now
            self._statistics.first_token(sequence, now)
        else:
            self._statistics.next_token(now - last_token_at)

    def _count_prompt_logprobs(
        self, plan: Plan, result: StepResult
    ) -> dict[int, npt.NDArray[np.int64]]:
        """Return, by row of the step, the entries of its prompt logprobs that are to be told.

        Those told before a preemption are left out, and all of rows that failed or whose sequence
        is over. Counts them as told: done first, so that who ends in this step has told its own.
        """
        due: dict[int, npt.NDArray[np.int64]] = {}
        if result.prompt_logprobs is None:
            return due
        rows = np.frombuffer(result.prompt_logprobs.rows, np.int32)
        sampling = plan.num_decodes - 1
        for number, row in enumerate(plan.prefills, plan.num_decodes):
            sampling += row.samples
            sequence = row.sequence
            failed = row.samples and result.status and result.status[sampling] != ROW_OK
            if failed or sequence.state is State.FINISHED:
                continue
            entries = np.flatnonzero(rows == number)  # of positions start + 1, start + 2, ...
            told = max(0, sequence.prompt_logprobs_sent - row.start - 1)
            if len(entries) > told:
                due[number] = entries[told:]
                sequence.prompt_logprobs_sent = row.start + 1 + len(entries)
        return due

    def _read_prefills(
        self,
        plan: Plan,
        columns: LogprobColumns | None,
        described: dict[int, npt.NDArray[np.int64]],
        placed: Indices,
        news: News,
        now: float,
    ) -> None:
        """Tell cache hits and prompt logprobs, and end sequences that wanted no token."""
        to = np.full(len(plan.slots), -1, np.int64)  # the row of the news of each row of the step
        sampling = plan.num_decodes - 1
        for number, row in enumerate(plan.prefills, plan.num_decodes):
            sequence, place = row.sequence, -1
            if row.samples:
                sampling += 1
                place = int(placed[sampling])
            elif sequence.state is not State.FINISHED and row.end == sequence.limit:
                self._finish(sequence, FINISH_LENGTH, now)
                place = news.add_row(sequence.seq_id, NO_TOKEN, FINISH_LENGTH)
            elif number in described:
                place = news.add_row(sequence.seq_id, NO_TOKEN, RUNNING)
            to[number] = place
            if place >= 0 and row.end == sequence.num_prompt:
                news.times.append((place, sequence.started_at, now))
                if sequence.num_cached:
                    news.cached.append((place, sequence.num_cached))
        if columns is not None and described:
            keep = np.zeros(len(columns.rows) // 4, np.bool_)
            keep[np.concatenate(list(described.values()))] = True
            news.prompt_logprobs = renumber(columns, to, keep)

    def _read_pooled(self, plan: Plan, columns: PooledColumns, news: News, now: float) -> None:
        """End the sequences that are pooled, and tell their vectors."""
        to = np.full(len(plan.slots), -1, np.int64)  # the row of the news of each row of the step
        finite = [bool(np.isfinite(vectors).all()) for vectors in vectors_of(columns)]
        for place, number in enumerate(np.frombuffer(columns.rows, np.int32).tolist()):
            row = plan.prefills[number - plan.num_decodes]
            sequence = row.sequence
            if sequence.state is State.FINISHED:
                continue
            if not finite[place]:
                self._fail(sequence, ROW_NAN, news, now)
                continue
            self._statistics.first_token(sequence, now)
            self._finish(sequence, FINISH_EOS, now)
            to[number] = news.add_row(sequence.seq_id, NO_TOKEN, FINISH_EOS)
            news.times.append((int(to[number]), sequence.started_at, now))
            if sequence.num_cached:
                news.cached.append((int(to[number]), sequence.num_cached))
        news.pooled = chosen_vectors(columns, to)

    # ------------------------------------------------------------------ rows without a slot

    def _read_departed(
        self,
        plan: Plan,
        result: StepResult,
        ids: Int32s,
        placed: Indices,
        news: News,
        now: float,
    ) -> None:
        """Give preempted sequences the tokens that were in flight; drop those of finished ones."""
        for slot, sequence in plan.departed.items():
            sequence.in_flight -= 1
            if sequence.state is State.FINISHED:
                continue
            for row in np.flatnonzero(plan.sample_slots == slot).tolist():
                status = result.status[row] if result.status else ROW_OK
                if status != ROW_OK:
                    self._fail(sequence, status, news, now)
                    continue
                token = int(ids[row])
                sequence.tokens = np.append(sequence.tokens, ids[row])
                self._time_token(sequence, sequence.last_token_at, now)
                sequence.last_token_at = now
                self._statistics.generation_tokens += 1
                if sequence.grammar is not None:
                    sequence.grammar.advance(token)
                code = self._finish_code(sequence, token, len(sequence.tokens))
                told = RUNNING if code == ERROR else code
                placed[row] = news.add_row(sequence.seq_id, token, told)
                if code == ERROR:
                    self._fail_grammar(sequence, news, now)
                elif code != RUNNING:
                    self._finish(sequence, code, now)
