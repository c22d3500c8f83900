"""Tells from a chat template's syntax tree in what form it takes the content of messages.

A template that loops over the content of a message takes lists of parts; one that never does takes
strings; one that also tests whether the content is a string takes either. Aliases are followed:
``set content = message.content``, ``set messages = messages[1:]``, and macros called with a
content. Pure: a tree in, a word out.
"""

from typing import Literal

from jinja2 import nodes

ContentForm = Literal["string", "list", "either"]

_FORM_TESTS = {"string", "iterable", "sequence", "mapping"}


def content_form(tree: nodes.Template) -> ContentForm:
    """Return ``string``, ``list`` or ``either``."""
    names = _Names(tree)
    if not any(names.is_content(loop.iter) for loop in tree.find_all(nodes.For)):
        return "string"
    tested = any(
        test.name in _FORM_TESTS and names.is_content(test.node)
        for test in tree.find_all(nodes.Test)
    )
    return "either" if tested else "list"


class _Names:
    """Which names of a template stand for the conversation, a message, or a message's content."""

    def __init__(self, tree: nodes.Template) -> None:
        self._conversations = {"messages"}
        self._messages: set[str] = set()
        self._contents: set[str] = set()
        before = -1
        while before != (before := self._known()):
            self._follow(tree)

    def _known(self) -> int:
        return len(self._conversations) + len(self._messages) + len(self._contents)

    def _follow(self, tree: nodes.Template) -> None:
        for loop in tree.find_all(nodes.For):
            if isinstance(loop.target, nodes.Name) and self._is_conversation(loop.iter):
                self._messages.add(loop.target.name)
        for assignment in tree.find_all(nodes.Assign):
            if isinstance(assignment.target, nodes.Name):
                self._learn(assignment.target.name, assignment.node)
        macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
        for call in tree.find_all(nodes.Call):
            if not (isinstance(call.node, nodes.Name) and call.node.name in macros):
                continue
            parameters = [parameter.name for parameter in macros[call.node.name].args]
            for parameter, value in zip(parameters, call.args, strict=False):
                self._learn(parameter, value)
            for keyword in call.kwargs:
                if keyword.key in parameters:
                    self._learn(keyword.key, keyword.value)

    def _learn(self, name: str, value: nodes.Node) -> None:
        if self.is_content(value):
            self._contents.add(name)
        elif self._is_message(value):
            self._messages.add(name)
        elif self._is_conversation(value):
            self._conversations.add(name)

    def _is_conversation(self, node: nodes.Node) -> bool:
        node = _bare(node)
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            return self._is_conversation(node.node)
        return isinstance(node, nodes.Name) and node.name in self._conversations

    def _is_message(self, node: nodes.Node) -> bool:
        node = _bare(node)
        if isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice):
            return self._is_conversation(node.node)
        return isinstance(node, nodes.Name) and node.name in self._messages

    def is_content(self, node: nodes.Node) -> bool:
        """Tell whether *node* is the content of a message."""
        node = _bare(node)
        if isinstance(node, nodes.CondExpr):
            branches = [node.expr1, node.expr2]
            return any(self.is_content(branch) for branch in branches if branch is not None)
        if isinstance(node, nodes.Getattr):
            return node.attr == "content" and self._is_message(node.node)
        if isinstance(node, nodes.Getitem):
            key = node.arg.value if isinstance(node.arg, nodes.Const) else None
            return key == "content" and self._is_message(node.node)
        return isinstance(node, nodes.Name) and node.name in self._contents


def _bare(node: nodes.Node) -> nodes.Node:
    """Return *node* without the filters on it."""
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    return node
