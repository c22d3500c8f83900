"""Renders templates that clients send in a process apart, which can be killed.

A template is a program. The checkpoint's own is trusted as the weights are, but one from a request
may be written to eat time or memory in a single operation that nothing in the process can
interrupt. So such templates are rendered by a child with an address-space limit, which is killed
when it does not answer in time.
"""

import msgspec

from zlm.errors import BadRequest, ZlmError
from zlm.tokenizer.bounded_process import BoundedProcess, ChildSide
from zlm.tokenizer.template_render import Conversation, render

MEMORY_BYTES = 1 << 30  # address space of the child


class Answer(msgspec.Struct, frozen=True):
    """The text, or what is wrong."""

    text: str = ""
    error: str | None = None
    param: str | None = None


class TemplateProcess(BoundedProcess):
    """The child. ``render`` blocks its caller for at most the conversation's time."""

    def __init__(self) -> None:
        super().__init__("zlm.tokenizer.template_process")

    def render(self, conversation: Conversation) -> str:
        """Return what ``template_render.render`` returns; raises what it raises."""
        try:
            frame = self.call(msgspec.msgpack.encode(conversation), conversation.seconds)
        except EOFError:
            message = "the chat template needs too much memory"
            raise BadRequest(message, param="chat_template") from None
        except TimeoutError:
            message = f"the chat template took longer than {conversation.seconds:g} seconds"
            raise BadRequest(message, param="chat_template") from None
        answer = msgspec.msgpack.decode(frame, type=Answer)
        if answer.error is not None:
            raise BadRequest(answer.error, param=answer.param)
        return answer.text


def _serve() -> None:
    """Answer conversations on standard input until it closes."""
    side = ChildSide(MEMORY_BYTES)
    side.send(b"")
    while (payload := side.receive()) is not None:
        conversation = msgspec.msgpack.decode(payload, type=Conversation)
        side.die_after(2 * conversation.seconds)
        try:
            answer = Answer(text=render(conversation))
        except ZlmError as error:
            answer = Answer(error=error.message, param=error.param)
        side.send(msgspec.msgpack.encode(answer))


if __name__ == "__main__":
    _serve()
