"""From a chat to the prefix key of its prompt, in bounded time.

A chat is bounded by rendering its first messages as one that is to be continued: what the template writes up to there
is what it writes for all of them. Its key ends, too, before what has no text: an image, or a message that only the
engine knows.

The doors of an engine that take a prompt, and how what is said at each becomes a chat or a completion.

An engine turns the requests of its other chat APIs into chat completions and renders those; so do we, by its own rules
(wire's `apis`), before anything is rendered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
from treeline_wire.apis import anthropic, responses
from treeline_wire.apis.conversion import MAX_CALL_VALUES, Context, Conversation, Unknown, items_of, many_values
from treeline_wire.chat import TemplateError
from treeline_wire.dialects import ChatDialect, dialect_of
from treeline_wire.normalization import long_run
from treeline_wire.prompt import Prompt, PromptError, TooDeep, prompt_of_completion

from treeline_epp.keyers.base import Keyer, Renderer
from treeline_epp.keyers.prompt_keyer import MAX_MESSAGES
from treeline_epp.requests.isolation import Cache
from treeline_epp.requests.outline import Summary

CHARS_PER_TOKEN: Final = 4
"""Rough, for requests of which nothing better is known."""
KEY_COST: Final = 192 * 1024
"""What is normalized and scanned of a prompt: characters, those beyond ASCII counted several times for their work."""
_NOT_ASCII: Final = 7
_LAST_BLANK: Final = re.compile(r"[ \n](?=[^ \n]*\Z)")
"""Text behind which a beginning may end: tokens and Unicode's forms do not reach over it."""


class KeyedPrompt(msgspec.Struct, frozen=True, gc=False):
    """`tokens` are estimated for the whole prompt. `key_tokens`: for what the key covers, where that is only the
    beginning of it."""

    key: bytes | None
    tokens: int
    key_tokens: int | None = None


def completion(summary: Summary, keyer: Keyer | None) -> KeyedPrompt:
    """The prompt of a completion (of the native API too); the key is that of the first, where there are several."""
    rough = KeyedPrompt(None, summary.size // CHARS_PER_TOKEN)
    if keyer is None:
        return rough
    body = summary.members
    if summary.cut is not None and isinstance(body.get("prompt"), str):
        body = {**body, "prompt": shortened(body["prompt"])}
    try:
        prompts = prompt_of_completion(body)
    except PromptError:
        return rough
    tokens: int | None = None
    if summary.cut is not None or len(prompts) > 1:
        tokens = sum(_tokens(prompt, keyer) for prompt in prompts)
    if tokens is not None and summary.cut is not None:
        tokens = tokens * summary.cut_bytes // summary.cut_read
    return keyed(prompts[0], keyer, tokens)


def keyed(prompt: Prompt, keyer: Keyer, tokens: int | None) -> KeyedPrompt:
    """The key of a prompt, or of its beginning. `tokens` of the whole request, where the prompt is not all of it."""
    bounded = _bounded(prompt)
    key = keyer.key(bounded)
    if key is None:
        return KeyedPrompt(None, tokens or _tokens(prompt, keyer))
    in_key = len(prompt.ids) if prompt.ids is not None else keyer.estimate_tokens(len(key))
    if bounded is prompt and tokens is None:
        return KeyedPrompt(key, in_key)
    return KeyedPrompt(key, max(in_key, tokens or _tokens(prompt, keyer)), in_key)


def _bounded(prompt: Prompt) -> Prompt:
    """A prompt, or its beginning where to normalize and scan all of it would take long."""
    text = prompt.text
    if text is None:
        return prompt
    size = len(text)
    while size > KEY_COST // _NOT_ASCII and (cost := _cost(text[:size])) > KEY_COST:
        size = min(size - 1, size * KEY_COST // cost)
    short = text if size == len(text) else shortened(text[:size])
    marks = long_run(short)
    if marks is not None:
        short = short[:marks]
    return prompt if short is text else Prompt(short, None, prompt.add_special_tokens)


def _cost(text: str) -> int:
    size = len(text)
    return size if text.isascii() else size + (_NOT_ASCII - 1) // 2 * (len(text.encode()) - size)


def _tokens(prompt: Prompt, keyer: Keyer) -> int:
    return len(prompt.ids) if prompt.ids is not None else keyer.estimate_tokens(len(prompt.text or ""))


def shortened(text: str) -> str:
    """A text up to its last blank, if there is one near its end: so no token reaches over the end of it."""
    found = _LAST_BLANK.search(text, max(0, len(text) - 1024))
    return text[: found.start()] if found is not None else text


Convert = Callable[[Mapping[str, Any], list[Any], Context], Conversation]


class Door(msgspec.Struct, frozen=True):
    """A kind of request with a prompt. `prompt` are the members that may hold it; the first that is there does.

    `convert` makes a chat of the members and the messages; None where they are one already. `chat`: it has messages,
    not a text.
    """

    suffix: str
    prompt: tuple[str, ...]
    chat: bool = True
    convert: Convert | None = None
    salted: bool = True
    """Every engine that has this door reads a salt in its body."""

    @property
    def api(self) -> str:
        """What an engine calls it."""
        return self.suffix.rpartition("/")[2]


def _first_of_batch(body: Mapping[str, Any], chats: list[Any], _: Context) -> Conversation:
    """vLLM's batch: a list of conversations, of which the first gives the key, as of several texts."""
    return Conversation(
        {**body, "messages": chats[0] if chats else []}, Unknown("messages", "there are several conversations")
    )


_DOORS: Final = (
    Door("/chat/completions/batch", ("messages",), convert=_first_of_batch, salted=False),
    Door("/chat/completions", ("messages",)),
    Door("/completions", ("prompt",), chat=False),
    Door("/generate", ("text", "input_ids"), chat=False),
    Door("/v1/responses", ("input",), convert=responses.to_chat, salted=False),
    Door("/v1/messages", ("messages",), convert=anthropic.to_chat, salted=False),
)


def door_of(path: str) -> Door | None:
    """The door of a path (without query, without a slash at its end); None for one that has no prompt."""
    for door in _DOORS:
        if path.endswith(door.suffix):
            return door
    return None


MAX_TOOLS: Final = 256
"""Tools and documents that a template is given; rendering costs by each."""
_READ: Final = frozenset(
    {
        "tools",
        "tool_choice",
        "documents",
        "chat_template_kwargs",
        "reasoning_effort",
        "reasoning",
        "add_generation_prompt",
        "continue_final_message",
        "system",
        "instructions",
        "thinking",
        "output_config",
        "previous_response_id",
        "input_ids",
        "chat_template",
    }
)
"""Members that say what is rendered."""
_MEDIA: Final = ("image_url", "image", "input_image", "input_audio", "audio_url", "video_url", "video", "file")


def chat(summary: Summary, keyer: Keyer | None, door: Door, engine: str, cache: Cache) -> KeyedPrompt:
    """The prompt of a chat for this type of engine. Raises `TooDeep`; other faults mean no key."""
    rough = KeyedPrompt(None, summary.size // CHARS_PER_TOKEN)
    if keyer is None or keyer.renderer is None or summary.left_out & _READ or not _few(summary.members):
        return rough
    try:
        found = _Chat(summary, keyer.renderer, door, engine, cache.client).prompt()
    except TooDeep:
        raise
    except (PromptError, TemplateError):
        return rough
    if found is None:
        return rough
    prompt, whole = found
    return keyed(prompt, keyer, None if whole else keyer.estimate_tokens(summary.size))


class _Chat:
    """One chat on its way to a prompt."""

    def __init__(self, summary: Summary, renderer: Renderer, door: Door, engine: str, client: str | None) -> None:
        self._client = client
        self._summary = summary
        self._renderer = renderer
        self._door = door
        self._dialect: ChatDialect = dialect_of(engine, door.api)
        self._context = Context(engine, renderer.inline_system)
        self._name = next((name for name in door.prompt if name in summary.members), door.prompt[0])
        ids = summary.members.get("input_ids") if engine == "sglang" and door.convert is None else None
        self._ids: list[Any] | None = ids if isinstance(ids, list) else None

    def prompt(self) -> tuple[Prompt, bool] | None:
        """The prompt, and whether it is all of it."""
        if self._ids is not None:  # the template is not asked
            return prompt_of_completion({"prompt": self._ids})[0], True
        if _brings_a_template(self._summary.members):
            return None
        value = self._summary.members.get(self._name)
        if self._summary.cut is not None:
            found = self._of_cut(value)
            return None if found is None else (found, False)
        conversation = self._converted(value)
        messages, known = self._known(conversation)
        if known and conversation.complete and len(messages) <= self._renderer.most(messages, self._client):
            whole = self._renderer.whole(conversation.body, self._dialect, self._client)
            if whole is not None:
                return whole, True
            found = self._beginning(conversation.body, messages[: len(messages) // 4], tries=1)
        else:
            found = self._beginning(conversation.body, messages)
        return None if found is None else (found, False)

    def _converted(self, value: Any) -> Conversation:
        members = self._summary.members
        if self._door.convert is None:
            return Conversation({**members, "messages": value})
        return self._door.convert(members, items_of(value, self._name), self._context)

    def _known(self, conversation: Conversation) -> tuple[list[Any], bool]:
        """The messages up to the first that has a part without text, with that one's beginning where the template
        writes parts in their order, or up to the one whose calls have too many values; and whether those are all."""
        messages = conversation.body["messages"]
        if not isinstance(messages, list):
            raise PromptError("messages", "must be a list")
        room = MAX_CALL_VALUES
        for i, message in enumerate(messages):
            room -= _call_values(message)
            if room < 0:
                return messages[:i], False
            content = message.get("content") if isinstance(message, dict) else None
            parts = content if isinstance(content, list) else []
            for j, part in enumerate(parts):
                if isinstance(part, dict) and (part.get("type") in _MEDIA or any(name in part for name in _MEDIA)):
                    before = parts[:j]
                    ordered = before and self._renderer.takes_lists(conversation.body, self._dialect)
                    return [*messages[:i], *([{**message, "content": before}] if ordered else ())], False
        return messages, True

    def _of_cut(self, value: Any) -> Prompt | None:
        """Render as far as the messages are known: with the beginning of the last one, or else up to it."""
        complete = self._summary.complete
        if isinstance(value, str):
            candidates: list[Any] = [shortened(value)]
        elif isinstance(value, list):
            candidates = [value if complete is value or len(value) > MAX_MESSAGES else _shorten_last(value), complete]
        else:
            return None
        for candidate in candidates:
            if not candidate:
                continue
            try:
                conversation = self._converted(candidate)
                known = self._known(conversation)[0]
                if _with_text_at_end(known):
                    return self._beginning(conversation.body, known)
            except TooDeep:
                raise
            except (PromptError, TemplateError):
                continue
        return None

    def _beginning(self, body: Mapping[str, Any], messages: list[Any], tries: int = 2) -> Prompt | None:
        """The prompt of the first messages; of a quarter of them where those take too long."""
        most = self._renderer.most(messages, self._client)
        for _ in range(tries):
            some = _with_text_at_end(_first(messages, most))
            if not some:
                return None
            prompt = self._renderer.beginning({**body, "messages": some}, self._dialect, self._client)
            if prompt is not None:
                return prompt
            most = len(some) // 4
        return None


def _brings_a_template(body: Mapping[str, Any]) -> bool:
    """Whether the request brings a template: engines may be configured to render by it."""
    kwargs = body.get("chat_template_kwargs")
    return body.get("chat_template") is not None or (isinstance(kwargs, dict) and "chat_template" in kwargs)


def _few(body: Mapping[str, Any]) -> bool:
    """Few enough tools and documents to be rendered?"""
    lists = (body.get("tools"), body.get("documents"))
    return all(not isinstance(value, list) or len(value) <= MAX_TOOLS for value in lists)


def _first(messages: list[Any], most: int) -> list[Any]:
    """At most so many messages. Where a user speaks again later, they end with a user: templates leave out what an
    assistant thought before the last question, and which one is the last must not depend on where we end."""
    if len(messages) <= most:
        return messages
    some = messages[:most]
    if not any(_role(message) == "user" for message in messages[most:]):
        return some
    last = next((i for i in range(most - 1, -1, -1) if _role(some[i]) == "user"), most - 1)
    return some[: last + 1]


def _with_text_at_end(messages: list[Any]) -> list[Any]:
    """Without the last ones that have no text, behind which a rendering could end. Behind that of a tool call it could
    not: templates write calls and texts in either order."""
    end = len(messages)
    while end:
        last = messages[end - 1]
        if isinstance(last, dict) and last.get("content") and not last.get("tool_calls"):
            break
        end -= 1
    return messages[:end]


def _call_values(message: Any) -> int:
    """The values in the arguments of a message's calls, as far as those are texts."""
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else ()
    texts = (function.get("arguments") for function in functions if isinstance(function, dict))
    return sum(many_values(text) for text in texts if isinstance(text, str))


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _shorten_last(messages: list[Any]) -> list[Any]:
    """The text of the last message ends where nothing that follows can change it."""
    last = messages[-1] if messages else None
    if not isinstance(last, dict) or not last:
        return messages
    content = last.get("content")
    if isinstance(content, str) and next(reversed(last)) == "content":
        return [*messages[:-1], {**last, "content": shortened(content)}]
    if isinstance(content, list) and content and isinstance(content[-1], dict):
        part = content[-1]
        if isinstance(part.get("text"), str) and next(reversed(part)) == "text":
            parts = [*content[:-1], {**part, "text": shortened(part["text"])}]
            return [*messages[:-1], {**last, "content": parts}]
    return messages[:-1]
