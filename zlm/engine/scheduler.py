"""The scheduler: which tokens of which sequences are computed in the next step.

Owns every sequence, the slots, the block tables and the steps in flight. Takes values and returns
values: no clock (``now`` is an argument), no socket, no device.

Rules

1.  A sequence is ``num_computed`` catching up with ``num_tokens``. Prefill, a chunk of it, decode,
    the first row of a fork and resumption after preemption are the same thing: a row of ``count``
    tokens from position ``start``. A row that reaches the last token samples the next one.
2.  A step has one token budget. Running decodes take one token each, then running prefills
    continue, then waiting sequences start, in order of (priority, arrival, id).
3.  Under KV pressure the last in that order is preempted: its blocks go back at once, and it waits
    to be recomputed. Only a sequence that is before it in order can preempt it, so the first one
    always gets on, and what was admitted always ends. Nothing starts in a step that preempted.
4.  A sequence that could not finish even if it ran alone is refused when it is submitted.

Running ahead

Step N+1 is planned while N runs. The token that N will sample is a *placeholder*: the worker finds
it in its own token table, the scheduler counts it in ``computed`` and learns its id later.

    position   0 1 2 3 4 5 6 7 8
    known      p p p p p a b            ids known here: known = 7
    step N                 ^            computes 6, samples 7
    step N+1                 ^          computes 7, a placeholder, samples 8: computed = 8

    - ``limit`` is known ahead, so no row is planned beyond it: the sequence *drains*, holding its
      slot, until its last token comes.
    - An EOS or stop id is learnt one step late (or depth - 1 steps): rows of it that are in flight
      are surplus. ``Plan.departed`` notes that their slot changed hands; results are dropped.
    - A preempted sequence still gets the tokens in flight (they are valid: preemption came after);
      it starts again only when nothing of it is in flight.
    - Blocks, and slots, are handed on at once, because workers execute strictly in order (see
      ``kv_groups``).

Prefix cache. A block is published when all its tokens are known and the steps that compute them
have been sent: at the next Python work for the sequence (block boundary, chunk, departure). It is
never written again: a hit is cut before the last known token, which is computed anew into a block
of the sequence's own, and a fork copies the block it goes on in. Sequences whose prompt logprobs
are due read nothing from the cache.

Forks. Of n samples, the first computes the prompt (and reports its logprobs); the others are HELD,
then queue, and start by sharing the first one's blocks up to the last prompt token, if it still
runs; else they are sequences like any other. If the first leaves before the prompt is computed,
the next one takes its part.

Grammars. A sequence with one runs ahead like any other. Its step is sent when it is planned; the
masks of the step follow when all tokens before it are known, while the worker computes.

Cost. A step costs O(changes): decode rows are advanced by numpy over columns of slots. Python runs
for a sequence only at a block boundary, a chunk, a start, an end.

Invariants (``check``): free + cached + in use = total in every pool; references = table entries;
a slot's columns agree with its block table; a slot is free or held by exactly one sequence.
"""

from collections import deque
from operator import attrgetter

import msgspec

from zlm.engine import invariants
from zlm.engine.block_pool import InvariantError
from zlm.engine.decodes import Decodes
from zlm.engine.grammar import GrammarMatcher
from zlm.engine.kv_groups import KVGroups
from zlm.engine.limits import SchedulerLimits, refusal
from zlm.engine.news import NO_TOKEN, News, refused
from zlm.engine.plan import (
    Indices,
    Plan,
    PrefillRow,
    make_execute,
    make_plan,
    note_masked,
    take_masks,
)
from zlm.engine.prefix_cache import BlockHasher
from zlm.engine.request import SEED_MODULUS, Sequence, State
from zlm.engine.results import ResultReader
from zlm.engine.sequence_keys import SequenceKeys
from zlm.engine.slots import SlotTable
from zlm.engine.stats import ERROR, Statistics
from zlm.engine.waiting import WaitingQueue
from zlm.messages import FINISH_ABORT, Abort, Execute, Join, Masks, StepResult, Submit

_order = attrgetter("order")


class Scheduler:
    """Plans steps and takes in their results."""

    def __init__(
        self, limits: SchedulerLimits, kv: KVGroups, hasher: BlockHasher, statistics: Statistics
    ) -> None:
        """Schedule over the empty *kv*, whose number of slots is that of *limits*."""
        self.limits = limits
        self.kv = kv
        self.max_sequence_tokens = kv.longest_sequence(
            limits.max_model_len, chunked=limits.chunked_prefill
        )
        self.statistics = statistics
        self._slots = SlotTable(limits.max_num_seqs, self.max_sequence_tokens)
        self._keys = SequenceKeys(
            kv, self._slots, hasher, enabled=limits.prefix_caching, verify=limits.verify
        )
        self._reader = ResultReader(
            self._slots, self.statistics, limits.eos_ids, limits.vocab_size, self._finish
        )
        self._by_id: dict[int, Sequence] = {}  # all that are not finished
        self._waiting = WaitingQueue()
        self._prefilling: dict[int, Sequence] = {}  # by slot: those with known tokens to compute
        # Steps.
        self._in_flight: deque[Plan] = deque()
        self._next_step = 0
        self._decodes = Decodes(self._slots, limits.stages)
        self._blocked: tuple[Sequence, int] | None = None  # (head, releases) when it did not fit
        # Of the step that is being planned.
        self._joins: list[Join] = []
        self._copies: list[tuple[int, int, int]] = []
        self._prompts_done: list[Sequence] = []  # it computes the ends of their prompts
        self._preempted = False

    @property
    def num_in_flight(self) -> int:
        """Steps planned whose results have not come."""
        return len(self._in_flight)

    @property
    def num_running(self) -> int:
        """Sequences with a slot."""
        return len(self._slots.sequences)

    @property
    def num_waiting(self) -> int:
        """Sequences without one."""
        return len(self._by_id) - self.num_running

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished or any step in flight."""
        return bool(self._by_id or self._in_flight)

    def unfinished(self) -> list[int]:
        """Return the ids of all sequences that are not over."""
        return list(self._by_id)

    # ------------------------------------------------------------------ commands

    def submit(self, submit: Submit, grammar: GrammarMatcher | None = None) -> News:
        """Take in a prompt (each sample starts where *grammar* is), or return its refusal."""
        news = News()
        error = refusal(submit, self.limits.max_model_len, self.max_sequence_tokens)
        if error is not None:
            self.statistics.refused(max(1, submit.n))
            return refused(submit, error)
        self.statistics.submitted(submit.n, submit.max_tokens)
        first = self._add(submit, 0, grammar)
        for sample in range(1, submit.n):
            sibling = self._add(submit, sample, grammar)
            sibling.state, sibling.parent = State.HELD, first
            first.held.append(sibling)
        self._waiting.push(first)
        return news

    def abort(self, abort: Abort, now: float) -> News:
        """End sequences in whatever state; those already over are passed by."""
        news = News()
        for seq_id in abort.seq_ids:
            sequence = self._by_id.get(seq_id)
            if sequence is not None:
                self._finish(sequence, FINISH_ABORT, now)
                news.add_row(seq_id, NO_TOKEN, FINISH_ABORT)
        return news

    def apply(self, result: StepResult, now: float) -> News:
        """Take in the result of the oldest step in flight."""
        plan = self._in_flight.popleft()
        if plan.step != result.step:
            raise InvariantError(f"step {plan.step} ran, but the result is of {result.step}")
        news = self._reader.read(plan, result, now)
        for row in plan.prefills:
            if row.sequence.held and row.end >= row.sequence.num_prompt:
                self._release_held(row.sequence)
        stalled = bool(self._by_id) and not self._in_flight
        self.statistics.computed(result.seconds, stalled=stalled)
        return news

    def plan(self, now: float) -> Execute | None:
        """Return the next step, or None if nothing can be computed before a result comes."""
        self._preempted = False
        self._decodes.begin()
        self._grow_decodes()
        rows = self._continue_prefills(self.limits.max_num_batched_tokens - self._decodes.count())
        if not self._preempted:
            taken = self._decodes.count() + sum(row.count for row in rows)
            rows += self._start_waiting(self.limits.max_num_batched_tokens - taken, now)
        if not rows and not self._decodes.count():
            return None
        return self._send(rows)

    def take_masks(self) -> Masks | None:
        """Return the masks of the oldest step in flight, once, if its sampling waits for them."""
        return take_masks(self._in_flight[0]) if self._in_flight else None

    # ------------------------------------------------------------------ submission

    def _add(self, submit: Submit, sample: int, grammar: GrammarMatcher | None) -> Sequence:
        order = (submit.priority if self.limits.by_priority else 0, submit.arrival)
        root = self._keys.root(submit.cache_salt)
        sequence = Sequence(submit, sample, (*order, submit.seq_id + sample), root)
        if sequence.seq_id in self._by_id:
            raise InvariantError(f"sequence {sequence.seq_id} was submitted twice")
        if grammar is not None:
            sequence.grammar = grammar.fork(ignore_eos=submit.ignore_eos)
        if sample:
            sequence.sampling = msgspec.structs.replace(
                submit.sampling,
                seed=(submit.sampling.seed + sample) % SEED_MODULUS,
                prompt_logprobs=-1,  # told once a prompt, by the sample that computes it
            )
        self._by_id[sequence.seq_id] = sequence
        return sequence

    # ------------------------------------------------------------------ departure

    def _finish(self, sequence: Sequence, code: int, now: float) -> None:
        """End *sequence*, in whatever state; *code* is a finish code or ERROR."""
        state, sequence.state = sequence.state, State.FINISHED
        if code == ERROR:
            self.kv.forget(sequence.keys)  # what it computed is not to be trusted
        if state is State.RUNNING:
            self._leave(sequence, publish=code != ERROR)
        elif state is State.WAITING:
            self._waiting.forget()
        elif sequence.parent is not None:
            sequence.parent.held.remove(sequence)
        if sequence.held:
            self._pass_on(sequence)
        sequence.parent = None
        del self._by_id[sequence.seq_id]
        self.statistics.finished(sequence, code, now)

    def _pass_on(self, sequence: Sequence) -> None:
        """Let the first sample that waits for *sequence* to compute the prompt do so instead."""
        heir, *rest = sequence.held
        sequence.held = []
        heir.parent, heir.state, heir.held = None, State.WAITING, rest
        heir.sampling = msgspec.structs.replace(
            heir.sampling, prompt_logprobs=sequence.sampling.prompt_logprobs
        )
        heir.prompt_logprobs_sent = sequence.prompt_logprobs_sent
        heir.counts_prompt = sequence.counts_prompt and sequence.started_at < 0.0
        for sibling in rest:
            sibling.parent = heir
        self._waiting.push(heir)

    def _release_held(self, sequence: Sequence) -> None:
        """Let the samples start that waited for *sequence* to compute the prompt.

        Not while prompt logprobs are due: if it ended now, one of them would have to tell them.
        """
        if sequence.reads_cache:
            for sibling in sequence.held:
                sibling.state = State.WAITING
                self._waiting.push(sibling)
            sequence.held = []

    def _preempt(self, sequence: Sequence) -> None:
        """Take slot and blocks from *sequence*; it is computed anew later."""
        sequence.state = State.WAITING
        self._leave(sequence, publish=True)
        self._waiting.push(sequence)
        self._preempted = True
        self.statistics.preemptions += 1

    def _leave(self, sequence: Sequence, *, publish: bool) -> None:
        """Take slot and blocks back; with *publish* the prefix cache knows what they hold."""
        slot = sequence.slot
        if publish:
            known, computed = self._slots.known[slot], self._slots.computed[slot]
            self._keys.publish(sequence, int(min(known, computed)))
        for plan in self._in_flight:
            sequence.in_flight += plan.depart(slot, sequence)
        self._decodes.changed |= bool(self._slots.decoding[slot])
        self._slots.leave(sequence)
        self._prefilling.pop(slot, None)
        self.kv.release(slot)
        sequence.prompt_step = -1
        sequence.num_published = 0

    # ------------------------------------------------------------------ running sequences

    def _grow_decodes(self) -> None:
        """Give each decoding sequence that has filled its blocks another one."""
        self._decodes.count()
        slots, columns = self._decodes.slots, self._slots
        full = slots[columns.computed[slots] >= columns.capacity[slots]]
        if not len(full):
            return
        growing = [columns.sequences[slot] for slot in full.tolist()]
        starts = columns.computed[full].tolist()
        known = columns.known[full].tolist()
        for sequence, start, num_known in zip(growing, starts, known, strict=True):
            self._keys.publish(sequence, min(start, num_known))
            self.kv.trim(sequence.slot, start)
        if len(growing) <= self.kv.min_free():
            self.kv.extend_each(full.tolist())
            columns.capacity[full] += self.kv.block_size
            return
        for sequence in sorted(growing, key=_order):
            slot = sequence.slot  # -1: preempted by one before it
            if slot >= 0:
                end = int(columns.computed[slot]) + 1
                if self._make_room(sequence, end):
                    columns.capacity[slot] = self.kv.extend(slot, end)

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Preempt from the end of the order until the table of *sequence* can cover *num_tokens*.

        Return False if nobody is left to preempt but *sequence* itself: a decoding one is then
        preempted too, a prefilling one keeps what it has and waits.
        """
        while self.kv.room(sequence.slot) < num_tokens:
            victim = max(self._slots.sequences.values(), key=_order)
            if victim is sequence:
                if self._slots.decoding[sequence.slot]:
                    self._preempt(sequence)
                return False
            self._preempt(victim)
        return True

    def _continue_prefills(self, budget: int) -> list[PrefillRow]:
        """Plan the next chunk of running sequences with known tokens to compute."""
        rows = []
        for sequence in sorted(self._prefilling.values(), key=_order):
            slot = sequence.slot
            if budget <= 0 or slot < 0:
                continue
            start = int(self._slots.computed[slot])
            self._keys.publish(sequence, start)
            self.kv.trim(slot, start)
            if self._make_room(sequence, start + 1):
                rows.append(self._add_row(sequence, start, budget))
                budget -= rows[-1].count
        return rows

    def _add_row(self, sequence: Sequence, start: int, most: int) -> PrefillRow:
        """Plan a row of *sequence* from *start*: *most* tokens, or what is left or has room."""
        slot, columns = sequence.slot, self._slots
        known = int(columns.known[slot])
        end = min(start + most, known, self.kv.room(slot))
        columns.computed[slot] = end
        columns.capacity[slot] = self.kv.extend(slot, end)
        if end < known:
            self._prefilling[slot] = sequence
        else:
            self._prefilling.pop(slot, None)
        if end >= sequence.num_prompt and sequence.prompt_step < 0:
            sequence.prompt_step = self._next_step
            self._prompts_done.append(sequence)
        samples = end == known and end < sequence.limit
        return PrefillRow(sequence, slot, start, end - start, samples)

    # ------------------------------------------------------------------ starting

    def _start_waiting(self, budget: int, now: float) -> list[PrefillRow]:
        """Start waiting sequences, in order, while slots, blocks and *budget* last."""
        rows: list[PrefillRow] = []
        while budget > 0 and self._slots.num_free:
            sequence = self._waiting.head()
            if sequence is None or sequence.in_flight or self._is_blocked(sequence):
                break
            row = self._start(sequence, budget, now)
            if row is None:
                break
            rows.append(row)
            budget -= row.count
        return rows

    def _is_blocked(self, sequence: Sequence) -> bool:
        """Whether *sequence* did not fit and nothing was given back since."""
        return bool(self._slots.sequences) and self._blocked == (sequence, self.kv.releases)

    def _start(self, sequence: Sequence, budget: int, now: float) -> PrefillRow | None:
        """Give *sequence* a slot, blocks and its first row, or return None if it must wait."""
        parent = sequence.parent
        position = sequence.num_prompt - 1
        if (
            parent is not None
            and parent.slot >= 0
            and 0 <= parent.prompt_step < self._next_step
            and len(sequence.tokens) == sequence.num_prompt
            and self.kv.can_fork(parent.slot, position)
        ):
            if not self.kv.min_free():
                self._blocked = sequence, self.kv.releases
                return None
            slot = self._join(sequence, parent.num_cached, now)
            sequence.keys = parent.keys[: position // self.kv.block_size]
            self._copies += self.kv.fork(parent.slot, slot, position)
            return self._add_row(sequence, position, 1)
        keys = self._keys.find_hit(sequence)
        start = len(keys) * self.kv.block_size
        left = len(sequence.tokens) - start
        if not self.limits.chunked_prefill and left > budget:
            return None
        if self._slots.sequences and not self._fits(keys, start + left, min(left, budget)):
            self._blocked = sequence, self.kv.releases
            return None
        if self.limits.prefix_caching and sequence.reads_cache and sequence.started_at < 0.0:
            self.statistics.looked_up(left + start, start)
        slot = self._join(sequence, start, now)
        self._slots.capacity[slot] = self._keys.adopt(sequence, keys)
        return self._add_row(sequence, start, budget)

    def _join(self, sequence: Sequence, num_cached: int, now: float) -> int:
        """Move *sequence* from the queue into a slot; return the slot."""
        self._waiting.pop()
        sequence.state = State.RUNNING
        sampling = sequence.sampling
        if sampling.prompt_logprobs >= 0 and sequence.reads_cache:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=-1)  # all told before
        slot = self._slots.join(sequence)
        self._joins.append(sequence.join(slot, sampling))
        if sequence.started_at < 0.0:
            sequence.started_at = now
            sequence.num_cached = min(num_cached, sequence.num_prompt)
            self.statistics.started(sequence, now)
        return slot

    def _fits(self, keys: list[bytes], num_tokens: int, chunk: int) -> bool:
        """Whether all *num_tokens* known tokens fit beside what runs, *keys* being cached."""
        promised = {slot: int(self._slots.known[slot]) for slot in self._prefilling}
        return self.kv.fits(keys, num_tokens, chunk, promised, len(self._slots.sequences))

    # ------------------------------------------------------------------ the message

    def _send(self, rows: list[PrefillRow]) -> Execute:
        """Put decodes and *rows* in flight as the next step and return its message."""
        count, columns = self._decodes.count(), self._slots
        slots = self._decodes.slots
        starts = columns.computed[slots]
        ends = starts + 1
        columns.computed[slots] = ends
        drained = slots[ends + 1 >= columns.limit[slots]]
        plan = make_plan(self._next_step, slots, ends, rows)
        note_masked(plan, columns)
        execute = make_execute(
            self._next_step,
            self._decodes.columns,
            starts,
            rows,
            self.kv.take_entries(),
            self._joins,
            self._copies,
            masked=bool(plan.masked),
            tokens=self._decodes.tokens(starts),
        )
        self._in_flight.append(plan)
        self._next_step += 1
        self.statistics.planned(count + sum(row.count for row in rows))
        self._settle(rows, drained)
        return execute

    def _settle(self, rows: list[PrefillRow], drained: Indices) -> None:
        """Make the columns ready for the step after the one just sent."""
        self._joins, self._copies = [], []
        if len(drained):
            self._slots.decoding[drained] = False
            self._decodes.changed = True
        for row in rows:
            if row.samples and row.end + 1 < row.sequence.limit:
                self._slots.decoding[row.slot] = True
                self._decodes.changed = True
        for sequence in self._prompts_done:
            self._release_held(sequence)
        self._prompts_done = []

    # ------------------------------------------------------------------ invariants

    def check(self) -> None:
        """Raise InvariantError unless slots, sequences, tables and pools agree (for tests)."""
        slots, queued = self.limits.max_num_seqs, len(self._waiting)
        invariants.check(self.kv, self._slots, self._by_id.values(), queued, slots)

    def check_idle(self) -> None:
        """Raise InvariantError unless nothing is held now that no sequence is left."""
        prefilling = self._prefilling.values()
        invariants.check_idle(self.kv, self._slots, prefilling, self.limits.max_num_seqs)
