"""Whether a chat template takes a message's content as a list of parts or as one text.

Engines read this from the template's syntax tree: a template that loops over a message's content takes lists. They
disagree on which variables are messages, and SGLang looks for some words first. vLLM: `_detect_content_format` in
vllm/renderers/hf.py (before 0.30 vllm/entrypoints/chat_utils.py). SGLang: `detect_jinja_template_content_format` in
sglang/srt/parser/jinja_template_utils.py.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Final

from jinja2 import nodes

from ..template_env import TemplateEnvironment

MAX_CHARS: Final = 32 << 10
"""The longest source that is parsed; known templates have up to 20 thousand characters. A longer one takes texts."""
_MEDIA_WORDS: Final = ("image", "audio", "video", "vision")
_SGLANG_NAMES: Final = ("message", "msg", "m")


def takes_lists(source: str) -> bool:
    """vLLM's rule: a loop iterates over the content of messages under any name, over a macro parameter that receives
    it, or (outside of macros) over a variable `content`."""
    return _verdicts(source)[0]


def takes_lists_in_sglang(source: str) -> bool:
    """SGLang's rule: the source names a medium, or loops over the content of `message`, `msg` or `m`."""
    return _verdicts(source)[1]


class _Unusual(Exception):
    """A construct on which vLLM's search fails; vLLM then passes texts."""


@functools.lru_cache(maxsize=512)
def _verdicts(source: str) -> tuple[bool, bool]:
    """The verdicts of vLLM and SGLang, from one parse, which takes milliseconds."""
    worded = any(word in source for word in _MEDIA_WORDS)
    if len(source) > MAX_CHARS:
        return False, worded
    try:
        tree = TemplateEnvironment().parse(source)
    except (Exception, RecursionError):  # `ChatTemplate` refuses templates that do not compile
        return False, worded
    try:
        lists = _loops_over_content(tree)
    except _Unusual:
        lists = False
    return lists, worded or _loops_over_named(tree)


def _loops_over_named(tree: nodes.Template) -> bool:
    return any(_reads(loop.iter, name, "content") for loop in tree.find_all(nodes.For) for name in _SGLANG_NAMES)


def _loops_over_content(tree: nodes.Template) -> bool:
    items = _items(tree)
    parameters = _content_parameters(tree, items)
    in_macros = {id(loop) for macro in tree.find_all(nodes.Macro) for loop in macro.find_all(nodes.For)}
    for loop in tree.find_all(nodes.For):
        name = loop.iter.name if isinstance(loop.iter, nodes.Name) else None
        if (
            any(_reads(loop.iter, item, "content") for item in items)
            or name in parameters.get(id(loop), ())
            or (name == "content" and id(loop) not in in_macros)
        ):
            _name(loop.target)
            return True
    return False


def _items(tree: nodes.Template) -> list[str]:
    """The variables of loops over the messages."""
    lists = ["messages"]
    for known in lists:  # grows in the loop
        for assigned in tree.find_all(nodes.Assign):
            if _reads(assigned.node, known) and (name := _name(assigned.target)) not in lists:
                lists.append(name)
    return [_name(loop.target) for loop in tree.find_all(nodes.For) if any(_reads(loop.iter, name) for name in lists)]


def _content_parameters(tree: nodes.Template, items: list[str]) -> dict[int, frozenset[str]]:
    """For each loop in a macro: the macro's parameters that receive a message's content in some call."""
    found: dict[int, frozenset[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        given = frozenset(_given(tree, macro, items))
        if given:
            found.update((id(loop), given) for loop in macro.find_all(nodes.For))
    return found


def _given(tree: nodes.Template, macro: nodes.Macro, items: list[str]) -> Iterator[str]:
    names = [argument.name for argument in macro.args]
    for call in tree.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
            continue
        pairs = [*zip(names, call.args, strict=False), *((word.key, word.value) for word in call.kwargs)]
        for name, value in pairs:
            if name in names and any(_reads(value, item, "content") for item in items):
                yield name


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether this is the variable `name` (its member `key`), perhaps filtered, tested or sliced."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is not None:
        if isinstance(node, nodes.Getattr):
            matches = node.attr == key
        elif isinstance(node, nodes.Getitem):
            matches = isinstance(node.arg, nodes.Const) and node.arg.value == key
        else:
            return False
        if not matches:
            return False
        node = node.node
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _Unusual
    return target.name
