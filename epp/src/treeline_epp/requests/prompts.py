"""The prefix key of a request's prompt, in bounded time.

A long chat is bounded by rendering only its first messages, as a chat to be continued: the template writes the same
text for them in the whole chat. A key also ends before the first part without text: a message that only the engine
knows, or an image, if it is not in the request itself or the model's template has no place for it.

`Door` lists the paths that take a prompt. An engine turns the requests of its other chat APIs into chat completions and
renders those; so do we, by its own rules (wire's `apis`), before anything is rendered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec
from treeline_wire.apis import anthropic, ollama, responses
from treeline_wire.apis.conversion import (
    MAX_CALL_VALUES,
    Context,
    Conversation,
    Convert,
    Unknown,
    items_of,
    many_values,
)
from treeline_wire.chat import TemplateError
from treeline_wire.dialects import ChatDialect, dialect_of
from treeline_wire.normalization import long_run
from treeline_wire.prompt import Prompt, PromptError, TooDeep, prompt_of_completion

from treeline_epp.index.items import Content
from treeline_epp.keyers.base import Keyer, Renderer
from treeline_epp.keyers.prompt_keyer import MAX_MESSAGES
from treeline_epp.requests.content import MAX_CONTENTS, content_of, contents_of, stand_in
from treeline_epp.requests.isolation import Cache
from treeline_epp.requests.outline import Summary

CHARS_PER_TOKEN: Final = 4
"""A rough estimate, for requests without a better one."""
KEY_COST: Final = 192 * 1024
"""Most characters of a prompt that are normalized and scanned; others than ASCII count several times, by their work."""
_NOT_ASCII: Final = 7
_MANY_IMAGES: Final = 0
"""Stands for images of a body that are too large to read: none is known."""
_LAST_BLANK: Final = re.compile(r"[ \n](?=[^ \n]*\Z)")
"""A blank before which a text may be cut: tokens and Unicode's forms do not reach over it."""


class KeyedPrompt(msgspec.Struct, frozen=True, gc=False):
    """The key of a prompt, and its size. `tokens` are estimated for the whole prompt; `key_tokens` for the part that
    the key covers, if that is only its beginning. `sent` as in `Request`.
    """

    key: bytes | None
    tokens: int
    key_tokens: int | None = None
    sent: Callable[[str, float], None] | None = None


def completion(summary: Summary, keyer: Keyer | None) -> KeyedPrompt:
    """Return the prompt of a completion (of the native API too); of several prompts, the first gives the key."""
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
    images = _MANY_IMAGES if "image_data" in summary.left_out else body.get("image_data")
    contents = [] if images is None else contents_of(images)
    if "video_data" in summary.left_out or body.get("video_data") is not None:
        contents.append(Content("", b""))  # how many tokens a video has, and where, only its processor knows
    return keyed(prompts[0], keyer, tokens, contents)


def keyed(prompt: Prompt, keyer: Keyer, tokens: int | None, contents: Sequence[Content] = ()) -> KeyedPrompt:
    """Return the key of a prompt with these contents, or of its beginning. `tokens` of the whole request without the
    contents, if that has more.
    """
    if contents and keyer.media is not None and prompt.text is not None:
        prompt = msgspec.structs.replace(prompt, text=keyer.media.expanded(prompt.text))
    bounded = _bounded(prompt)
    key = keyer.key(bounded)
    if key is None:
        return KeyedPrompt(None, tokens or _tokens(prompt, keyer))
    complete, of_items, sent = bounded is prompt and tokens is None, 0, None
    in_key = len(prompt.ids) if prompt.ids is not None else keyer.estimate_tokens(len(key))
    if contents and keyer.media is not None:
        placed = keyer.media.placed(key, contents)
        key, of_items, complete = placed.key, placed.tokens, complete and placed.complete
        in_key = keyer.estimate_tokens(len(key))
        sent = partial(keyer.media.expect, placed.expected)
    if complete:
        return KeyedPrompt(key, in_key, None, sent)
    return KeyedPrompt(key, max(in_key, (tokens or _tokens(prompt, keyer)) + of_items), in_key, sent)


def _bounded(prompt: Prompt) -> Prompt:
    """Return a prompt, or its beginning if all of it would take long to normalize and scan."""
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
    """Return a text up to its last blank, if there is one near its end: so no token reaches over its end."""
    found = _LAST_BLANK.search(text, max(0, len(text) - 1024))
    return text[: found.start()] if found is not None else text


class Door(msgspec.Struct, frozen=True):
    """A kind of request with a prompt. `prompt` are the members that may hold it; the first present one does. `convert`
    makes a chat of the members and the messages; None if they are one already. `chat`: it has messages, not a text.
    """

    suffix: str
    prompt: tuple[str, ...]
    chat: bool = True
    convert: Convert | None = None
    salted: bool = True
    """Whether every engine with this door reads a salt in its body."""
    apart: bool = False
    """Whether one engine may compute the prompt and another one the answer."""

    @property
    def api(self) -> str:
        """The engine's name for it."""
        return self.suffix.rpartition("/")[2]


def _first_of_batch(body: Mapping[str, Any], chats: list[Any], _: Context) -> Conversation:
    """Convert vLLM's batch, a list of conversations: the first one gives the key, as with several texts."""
    return Conversation(
        {**body, "messages": chats[0] if chats else []}, Unknown("messages", "there are several conversations")
    )


_DOORS: Final = (
    Door("/chat/completions/batch", ("messages",), convert=_first_of_batch, salted=False),
    Door("/chat/completions", ("messages",), apart=True),
    Door("/completions", ("prompt",), chat=False, apart=True),
    Door("/api/chat", ("messages",), convert=ollama.to_chat, salted=False),
    Door("/api/generate", ("prompt",), convert=ollama.text_to_chat, salted=False),
    Door("/generate", ("text", "input_ids"), chat=False, apart=True),
    Door("/v1/responses", ("input",), convert=responses.to_chat, salted=False),
    Door("/v1/messages", ("messages",), convert=anthropic.to_chat, salted=False),
)


def door_of(path: str) -> Door | None:
    """Return the door of a path (without query, without a slash at its end); None for a path without a prompt."""
    for door in _DOORS:
        if path.endswith(door.suffix):
            return door
    return None


MAX_TOOLS: Final = 256
"""Most tools, and most documents, that a template gets; each costs time."""
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
        "images",
        "raw",
        "think",
    }
)
"""Members that decide the rendering."""
_MEDIA: Final = ("image_url", "image", "input_image", "input_audio", "audio_url", "video_url", "video", "file")


def chat(summary: Summary, keyer: Keyer | None, door: Door, engine: str, cache: Cache) -> KeyedPrompt:
    """Return the prompt of a chat for this type of engine. Raises `TooDeep`; other faults mean no key."""
    rough = KeyedPrompt(None, summary.size // CHARS_PER_TOKEN)
    if keyer is None or keyer.renderer is None or summary.left_out & _READ or not _few(summary.members):
        return rough
    try:
        reading = _Chat(summary, keyer.renderer, door, engine, cache.client)
        found = reading.prompt()
    except TooDeep:
        raise
    except (PromptError, TemplateError):
        return rough
    if found is None:
        return rough
    prompt, whole = found
    return keyed(prompt, keyer, None if whole else keyer.estimate_tokens(summary.size), reading.contents)


class _Chat:
    """The conversion of one chat to a prompt. `contents` are those of its items, in order."""

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
        self.contents: list[Content] = []

    def prompt(self) -> tuple[Prompt, bool] | None:
        """Return the prompt, and whether it is complete."""
        if self._ids is not None:  # the template is not used
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
            body = {**conversation.body, "messages": messages}
            whole = self._renderer.whole(body, self._dialect, self._client)
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
        """Return the messages, and whether those are all: else they end before the first item that is unknown, with the
        beginning of its message if the template writes parts in their order, or before the message whose calls have too
        many values.
        """
        messages = conversation.body["messages"]
        if not isinstance(messages, list):
            raise PromptError("messages", "must be a list")
        self.contents = []
        shown: list[Any] = []
        room = MAX_CALL_VALUES
        for message in messages:
            room -= _call_values(message)
            if room < 0:
                return shown, False
            content = message.get("content") if isinstance(message, dict) else None
            if not isinstance(content, list) or not any(map(_is_item, content)):
                shown.append(message)
                continue
            parts = self._known_parts(content)
            if len(parts) == len(content):
                shown.append({**message, "content": parts})
                continue
            if parts and self._renderer.takes_lists(conversation.body, self._dialect):
                shown.append({**message, "content": parts})
            return shown, False
        return shown, True

    def _known_parts(self, parts: list[Any]) -> list[Any]:
        """Return a message's parts up to the first item that is unknown, with stand-ins for the others' contents."""
        shown = []
        for part in parts:
            if _is_item(part):
                content = content_of(part) if len(self.contents) < MAX_CONTENTS else None
                if content is None or not self._renderer.shows(content.kind):
                    break
                self.contents.append(content)
                part = stand_in(content)
            shown.append(part)
        return shown

    def _of_cut(self, value: Any) -> Prompt | None:
        """Render the known messages of a cut chat: with the beginning of the last one, or else up to it."""
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
        """Return the prompt of the first messages; of a quarter of them if those take too long."""
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


def _is_item(part: Any) -> bool:
    return isinstance(part, dict) and (part.get("type") in _MEDIA or any(name in part for name in _MEDIA))


def _brings_a_template(body: Mapping[str, Any]) -> bool:
    """Return whether the request has its own template: engines may be configured to render with it."""
    kwargs = body.get("chat_template_kwargs")
    return body.get("chat_template") is not None or (isinstance(kwargs, dict) and "chat_template" in kwargs)


def _few(body: Mapping[str, Any]) -> bool:
    """Return whether there are few enough tools and documents to render."""
    lists = (body.get("tools"), body.get("documents"))
    return all(not isinstance(value, list) or len(value) <= MAX_TOOLS for value in lists)


def _first(messages: list[Any], most: int) -> list[Any]:
    """Return at most `most` messages. If a user speaks again later, they end with a user: templates leave out an
    assistant's reasoning before the last question, and which question is the last must not depend on the cut.
    """
    if len(messages) <= most:
        return messages
    some = messages[:most]
    if not any(_role(message) == "user" for message in messages[most:]):
        return some
    last = next((i for i in range(most - 1, -1, -1) if _role(some[i]) == "user"), most - 1)
    return some[: last + 1]


def _with_text_at_end(messages: list[Any]) -> list[Any]:
    """Return the messages without the last ones that have no text after which a rendering could end. The text of a tool
    call is no such end: templates write calls and texts in either order.
    """
    end = len(messages)
    while end:
        last = messages[end - 1]
        if isinstance(last, dict) and _has_text(last.get("content")) and not last.get("tool_calls"):
            break
        end -= 1
    return messages[:end]


def _has_text(content: Any) -> bool:
    return any(not _is_item(part) for part in content) if isinstance(content, list) else bool(content)


def _call_values(message: Any) -> int:
    """Return the number of values in the arguments of a message's calls, where those are texts."""
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else ()
    texts = (function.get("arguments") for function in functions if isinstance(function, dict))
    return sum(many_values(text) for text in texts if isinstance(text, str))


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _shorten_last(messages: list[Any]) -> list[Any]:
    """Cut the text of the last message where later text cannot change it."""
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
