"""What layers do together with those of other ranks, each of which has a part of every weight.

A product whose columns are shared out gives each rank a part of a sum (``summed``); the embedding
looks up the rows that a rank has, and the head gives the logits of those (``embedding``, ``head``).
``once`` stands for what is added to a sum: it counts on the first rank alone. Without other ranks
all of this is nothing, and costs nothing.

In a pipeline a ``Stage`` has some of the layers, of which each rank has its part.

Knows what is exchanged; how, is the ``Exchange``'s and the ``Stage``'s (``zlm.worker.parallel``).
"""

from typing import Protocol

import torch
from torch import Tensor

from zlm.ops.backend import Embedding, LMHead, Norm, Product


class Exchange(Protocol):
    """All ranks call the same operations in the same order; the results are the same bits."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' *x*, which is used up: the result may be in its place."""

    def adds(self, residual: Tensor) -> bool:
        """Tell whether ``add`` to it is better than a sum to which one rank has added it."""

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return the sum of the ranks' *x*, plus *residual*, which is used up as *x* is."""

    def gather(self, x: Tensor, columns: int) -> Tensor:
        """Return the first *columns* columns of the ranks' x [n, k] side by side, contiguous."""


class Stage:
    """One of the stages of a pipeline, each of which has some of the layers; here the only one."""

    index = 0
    count = 1

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def receive(self, hidden: Tensor) -> Tensor:
        """Fill *hidden* with what the stage before sends, and return it."""
        raise NotImplementedError("the first stage has nobody before it")

    def send(self, hidden: Tensor) -> None:
        """Send *hidden* to the next stage; it may be changed when this returns."""
        raise NotImplementedError("the last stage has nobody after it")


class Parallel:
    """How the layers of one rank work with those of the others. Keeps nothing of a step."""

    def __init__(self, exchange: Exchange | None = None, stage: Stage | None = None) -> None:
        """Without an *exchange* there is one rank, without *stage* one of them."""
        self.exchange = exchange
        self.stage = stage or Stage()

    @property
    def rank(self) -> int:
        return 0 if self.exchange is None else self.exchange.rank

    @property
    def size(self) -> int:
        return 1 if self.exchange is None else self.exchange.size

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' *x*, which is used up."""
        return x if self.exchange is None else self.exchange.sum(x)

    def once(self, x: Tensor) -> Tensor:
        """Return *x* as a summand that counts once: zeros on other ranks than the first."""
        return x if self.rank == 0 else torch.zeros_like(x)

    def summed(self, product: Product) -> Product:
        """Return *product*, whose result is to be summed over the ranks."""
        return product if self.exchange is None else SummedProduct(product, self.exchange)

    def embedding(self, embedding: Embedding, rows: int) -> Embedding:
        """Return the lookup in all ranks' rows, of which *embedding* has this one's *rows*."""
        if self.exchange is None:
            return embedding
        return SharedEmbedding(embedding, rows, self.exchange)

    def head(self, head: LMHead, vocab_size: int) -> LMHead:
        """Return the head with the logits of all ranks, of which *head* gives this one's."""
        if self.exchange is None:
            return head
        return GatheredHead(head, vocab_size, self.exchange)


ALONE = Parallel()


class SummedProduct:
    """See ``zlm.ops.backend.Product``: each rank has some columns of the weight."""

    def __init__(self, product: Product, exchange: Exchange) -> None:
        self._product = product
        self._exchange = exchange

    def __call__(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        return self._exchange.sum(self._product(x, norm))

    def add(self, x: Tensor, residual: Tensor, norm: Norm | None = None) -> Tensor:
        if self._exchange.adds(residual):
            return self._exchange.add(self._product(x, norm), residual)
        if self._exchange.rank == 0:
            part = self._product.add(x, residual, norm)
        else:
            part = self._product(x, norm).to(residual.dtype)
        return self._exchange.sum(part)


class SharedEmbedding:
    """See ``zlm.ops.backend.Embedding``: each rank has *rows* rows of the weight."""

    def __init__(self, embedding: Embedding, rows: int, exchange: Exchange) -> None:
        self._embedding = embedding
        self._first = exchange.rank * rows
        self._rows = rows
        self._exchange = exchange

    def __call__(self, token_ids: Tensor) -> Tensor:
        own = token_ids - self._first
        kept = own.clamp(0, self._rows - 1)
        rows = self._embedding(kept)
        rows.masked_fill_((own != kept)[:, None], 0.0)
        return self._exchange.sum(rows)


class GatheredHead:
    """See ``zlm.ops.backend.LMHead``: each rank gives the logits of its rows of the vocabulary."""

    def __init__(self, head: LMHead, vocab_size: int, exchange: Exchange) -> None:
        self._head = head
        self._vocab_size = vocab_size
        self._exchange = exchange

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._exchange.gather(self._head(hidden), self._vocab_size)
