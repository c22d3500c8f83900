"""Events of an output parser, brought to one form whatever the chunks were."""

from collections.abc import Iterable

from zlm.tokenizer.output_source import CallArguments, Content, Event, Reasoning


def joined(events: Iterable[Event]) -> list[Event]:
    """Return *events* with neighbours of one kind made one: how the text was cut is gone."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        match last, event:
            case Content(a), Content(b):
                result[-1] = Content(a + b)
            case Reasoning(a), Reasoning(b):
                result[-1] = Reasoning(a + b)
            case CallArguments(a), CallArguments(b):
                result[-1] = CallArguments(a + b)
            case _:
                result.append(event)
    return result
