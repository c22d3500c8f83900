"""Tells from a chat template's syntax tree in what form it takes the arguments of tool calls.

OpenAI's clients send them as a string of JSON. Some templates write that string as it is; most want
the object, to write it as JSON of their own or to loop over it. Pure: a tree in, a word out.
"""

from typing import Literal

from jinja2 import nodes

ArgumentsForm = Literal["object", "string"]

_OBJECT_FILTERS = {"tojson", "items", "dictsort", "length"}
_FORM_TESTS = {"string", "mapping"}


def arguments_form(tree: nodes.Template) -> ArgumentsForm:
    """Return ``string`` if *tree* only ever writes arguments out as text, else ``object``."""
    names = {"arguments"}
    before = 0
    while before != (before := len(names)):
        for assignment in tree.find_all(nodes.Assign):
            if isinstance(assignment.target, nodes.Name) and _is(assignment.node, names):
                names.add(assignment.target.name)
    filters = [item for item in tree.find_all(nodes.Filter) if item.name in _OBJECT_FILTERS]
    as_object = any(_is(item.node, names) for item in filters)
    as_object |= any(
        test.name in _FORM_TESTS and _is(test.node, names) for test in tree.find_all(nodes.Test)
    )
    as_object |= any(_is(loop.iter, names) for loop in tree.find_all(nodes.For))
    parts: list[nodes.Getattr | nodes.Getitem] = [*tree.find_all(nodes.Getattr)]
    parts += tree.find_all(nodes.Getitem)
    as_object |= any(_is(part.node, names) for part in parts)
    as_object |= any(_is(item, names) for call in tree.find_all(nodes.Call) for item in call.args)
    if as_object:
        return "object"
    written = [child for output in tree.find_all(nodes.Output) for child in output.nodes]
    written += [side for add in tree.find_all(nodes.Add) for side in (add.left, add.right)]
    written += [part for joined in tree.find_all(nodes.Concat) for part in joined.nodes]
    return "string" if any(_is(node, names) for node in written) else "object"


def _is(node: nodes.Node | None, names: set[str]) -> bool:
    """Tell whether *node* stands for the arguments of a call."""
    if isinstance(node, nodes.Getattr):
        return node.attr == "arguments"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "arguments"
    return isinstance(node, nodes.Name) and node.name in names - {"arguments"}
