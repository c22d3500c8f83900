"""Layers that are alike, of which one in a step says all that there is to find out.

What kernels a model launches is found by executing its steps (``zlm.worker.kernel_variants``). The
layers of a model are dozens, but of one kind or two: ``one_of_each`` has a step pass through the
first of each kind alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zlm.layers.attention import LayerStep
from zlm.models.registry import Model

Kind = tuple[Any, ...]


@contextmanager
def one_of_each(model: Model) -> Iterator[None]:
    """Have steps of *model* skip layers that are as one before in the step, while in this context.

    Their results mean nothing then. A step's last layer is not skipped where it alone goes on with
    picked tokens.
    """
    layers: list[Any] = model.layers  # type: ignore[attr-defined]
    whole, seen = list(layers), set[Kind]()
    layers[:] = [_Once(layer, seen, is_first=layer is whole[0]) for layer in whole]
    try:
        yield
    finally:
        layers[:] = whole


class _Once:
    """A layer that hands on what it is given if the step has met one like it."""

    def __init__(self, layer: Any, seen: set[Kind], *, is_first: bool) -> None:
        self._layer = layer
        self._kind = kind_of(layer)
        self._seen = seen
        self._is_first = is_first

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, *given: Any) -> Any:
        place = next(i for i, value in enumerate(given) if isinstance(value, LayerStep))
        step: LayerStep = given[place]
        if self._is_first:
            self._seen.clear()
        kind = self._kind, id(step.rotation), id(step.work), kind_of(step.cache)
        if kind in self._seen and step.picked is None:
            return given[0] if place == 1 else given[:place]
        self._seen.add(kind)
        return self._layer(*given)


def kind_of(value: Any) -> Kind:
    """Return what *value* and what it is made of are like, whatever numbers its tensors hold."""
    return _kind(value, {})


def _kind(value: Any, known: dict[int, int]) -> Kind:
    """*known*: numbers of the objects that were met before, by their ids."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device
    if id(value) in known:
        return (known[id(value)],)
    if isinstance(value, dict):
        known[id(value)] = len(known)
        return tuple((key, _kind(each, known)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), *(_kind(each, known) for each in value)
    names = list(getattr(value, "__dict__", ()))
    names += [name for each in type(value).__mro__ for name in getattr(each, "__slots__", ())]
    if not names or isinstance(value, type):
        return (value if value.__hash__ is not None else id(value),)
    known[id(value)] = len(known)
    parts = ((name, _kind(getattr(value, name, None), known)) for name in names)
    return type(value), *parts
