"""Sees that a grammar compiles, in bounded time, before the engine core gets it.

``GrammarChecks`` owns the child processes that try grammars and remembers those that were fine.
With a way to call back it never blocks: requests wait for their own grammar, not for another's.
"""

import queue
from array import array
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

from zlm.errors import Internal, ZlmError
from zlm.messages import Grammar, TokenBytes
from zlm.tokenizer.grammar_process import GrammarProcess
from zlm.tokenizer.token_table import TokenTable
from zlm.tokenizer.vocabulary import Vocabulary

MAX_KEPT = 1024  # grammars known to be fine
PROCESSES = 2  # grammars tried at once

Done = Callable[[ZlmError | None], None]


class GrammarChecks:
    """Tries grammars. To be called from one thread."""

    def __init__(
        self,
        tokens: Callable[[], TokenBytes],
        vocab_size: int,
        seconds: float,
        run_later: Callable[[Callable[[], None]], object] | None,
    ) -> None:
        """*tokens* tells the vocabulary, whose model gives *vocab_size* logits.

        *run_later* has a function called on the caller's thread, from any other; None: ``check``
        blocks for up to *seconds*.
        """
        self._run_later = run_later
        self._good: OrderedDict[Grammar, None] = OrderedDict()
        count = 1 if run_later is None else PROCESSES
        self._all = [GrammarProcess(tokens, vocab_size, seconds) for _ in range(count)]
        self._idle: queue.SimpleQueue[GrammarProcess] = queue.SimpleQueue()
        for process in self._all:
            self._idle.put(process)
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="grammar-check")

    def check(self, grammar: Grammar, done: Done) -> None:
        """Have *done* called with what is wrong with *grammar*, or with None."""
        if grammar in self._good:
            self._good.move_to_end(grammar)
            done(None)
        elif self._run_later is None:
            self._tell(grammar, self._try(grammar), done)
        else:
            self._pool.submit(self._try_apart, self._run_later, grammar, done)

    def close(self) -> None:
        """End the child processes."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in self._all:
            process.close()

    def _try_apart(
        self,
        run_later: Callable[[Callable[[], None]], object],
        grammar: Grammar,
        done: Done,
    ) -> None:
        error: ZlmError | None
        try:
            error = self._try(grammar)
        except Exception as fault:
            error = Internal(f"the grammar could not be checked: {fault}")
        run_later(lambda: self._tell(grammar, error, done))

    def _try(self, grammar: Grammar) -> ZlmError | None:
        process = self._idle.get()
        try:
            return process.check(grammar)
        finally:
            self._idle.put(process)

    def _tell(self, grammar: Grammar, error: ZlmError | None, done: Done) -> None:
        if error is None:
            self._good[grammar] = None
            if len(self._good) > MAX_KEPT:
                self._good.popitem(last=False)
        done(error)


def token_bytes(vocabulary: Vocabulary, table: TokenTable, eos_ids: tuple[int, ...]) -> TokenBytes:
    """Return what each id of *vocabulary* stands for."""
    count = max(vocabulary.tokenizer.get_vocab().values(), default=-1) + 1
    raw = [table.raw[token_id] for token_id in range(count)]
    return TokenBytes(
        data=b"".join(raw),
        ends=array("i", accumulate(map(len, raw))).tobytes(),
        special_ids=array("i", sorted({*vocabulary.special_ids, *eos_ids})).tobytes(),
        eos_ids=array("i", eos_ids).tobytes(),
    )
