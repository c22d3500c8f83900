"""Prompts with a grammar on their way to the scheduler: compiled beside the engine's loop.

``GrammarQueue`` owns the prompts that wait and the threads that compile (the library lets go of
Python's lock meanwhile), so a grammar that takes long holds up nobody else. What was compiled is
kept: most servers see the same few grammars again and again.
"""

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from zlm.engine.grammar import GrammarCompiler, GrammarMatcher
from zlm.errors import ZlmError
from zlm.messages import Grammar, Submit, TokenBytes

MAX_KEPT = 128  # compiled grammars
THREADS = 4


@dataclass(slots=True)
class Compiled:
    """A prompt that need not wait any more: its matcher, or what is wrong with its grammar."""

    submit: Submit
    result: GrammarMatcher | ZlmError
    aborted: list[int] = field(default_factory=list)  # sequences of it that were aborted meanwhile


@dataclass(slots=True)
class _Waiting:
    submit: Submit
    future: Future[GrammarMatcher]
    aborted: list[int] = field(default_factory=list)


class GrammarQueue:
    """Owns what waits for its grammar."""

    def __init__(self, vocab_size: int) -> None:
        """*vocab_size* is the number of logits of a row."""
        self._vocab_size = vocab_size
        self._compiler: Future[GrammarCompiler] | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._kept: OrderedDict[Grammar, Future[GrammarMatcher]] = OrderedDict()
        self._waiting: list[_Waiting] = []

    def __len__(self) -> int:
        """Prompts that wait."""
        return len(self._waiting)

    def learn(self, tokens: TokenBytes) -> None:
        """Read the vocabulary, which is the same whoever tells it."""
        if self._compiler is None:
            self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")
            self._compiler = self._pool.submit(GrammarCompiler, tokens, self._vocab_size)

    def put(self, submit: Submit) -> None:
        """Take in a prompt with a grammar; the vocabulary was told before."""
        grammar = submit.grammar
        assert grammar is not None, "a prompt without a grammar need not wait"
        assert self._compiler is not None and self._pool is not None, "no vocabulary was told"
        future = self._kept.get(grammar)
        if future is None:
            future = self._pool.submit(_compile, self._compiler, grammar)
            self._kept[grammar] = future
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(grammar)
        self._waiting.append(_Waiting(submit, future))

    def abort(self, seq_ids: list[int]) -> list[int]:
        """Note that sequences are aborted; return those of them that do not wait here."""
        others = []
        for seq_id in seq_ids:
            waiting = self._waiting_for(seq_id)
            if waiting is None:
                others.append(seq_id)
            elif seq_id not in waiting.aborted:
                waiting.aborted.append(seq_id)
        return others

    def waiting(self) -> list[int]:
        """Return the sequences that wait."""
        submits = [each.submit for each in self._waiting]
        return [submit.seq_id + sample for submit in submits for sample in range(submit.n)]

    def take(self) -> list[Compiled]:
        """Return the prompts whose grammar is done, in the order they came."""
        done = [each for each in self._waiting if each.future.done()]
        if done:
            self._waiting = [each for each in self._waiting if not each.future.done()]
        return [Compiled(each.submit, _result(each.future), each.aborted) for each in done]

    def close(self) -> None:
        """End the threads; what they compile is given up."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _waiting_for(self, seq_id: int) -> _Waiting | None:
        for each in self._waiting:
            if each.submit.seq_id <= seq_id < each.submit.seq_id + each.submit.n:
                return each
        return None


def _compile(compiler: Future[GrammarCompiler], grammar: Grammar) -> GrammarMatcher:
    return compiler.result().compile(grammar)


def _result(future: Future[GrammarMatcher]) -> GrammarMatcher | ZlmError:
    """Return the matcher, or what is wrong with the grammar; raises what is wrong with us."""
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, ZlmError):
        return error
    raise error
