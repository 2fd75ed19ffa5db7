"""Requests → token ids, and ids → text: a model's tokenizer and chat template. Never waits."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import jinja2
from jinja2 import meta, nodes
from tokenizers import Tokenizer
from treeline_wire.apis.conversion import takes_inline_system
from treeline_wire.chat import ChatTemplate, NeedsWorkerError, TemplateBusyError, TemplateError, on_event_loop
from treeline_wire.dialects.media_parts import MediaPart
from treeline_wire.keys import KeySelfTestError, PrefixKeys
from treeline_wire.prompt import Prompt, PromptError, prompt_of_chat
from treeline_wire.template_env import TemplateEnvironment
from treeline_wire.tokenizer import BundleError, TokenizerBundle

from treeline_runtime.messages import GenerateReq
from treeline_runtime.parsers import STRAYS
from treeline_runtime.server.errors import ApiError, invalid, unsupported, wrong
from treeline_runtime.server.fields import check_messages, ignore
from treeline_runtime.server.limits import INLINE_BYTES, MAX_PROMPT_TOKENS, Limits
from treeline_runtime.server.tokenization import CachedTokenizer
from treeline_runtime.templates.pool import TemplatePool


class SpecialTokens:
    """The texts of a tokenizer's special tokens, perhaps thousands; computed once."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = frozenset(text for text in texts if text)
        self.beginnings = frozenset(text[:end] for text in self.texts for end in range(1, len(text)))
        self.longest = max(map(len, self.texts), default=0)
        # The shortest first: the result does not depend on later text.
        self._sizes = sorted({len(text) for text in self.texts})
        first = "".join(sorted({re.escape(text[0]) for text in self.texts}))
        self._first = re.compile(f"[{first}]" if first else r"(?!)")

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Their places in a text, in order. O(characters x sizes)."""
        behind = 0
        for match in self._first.finditer(text):
            start = match.start()
            if start < behind:
                continue
            end = next((start + size for size in self._sizes if text[start : start + size] in self.texts), None)
            if end is not None:
                behind = end
                yield start, end


class Unmarked:
    """Text in pieces, without special tokens. A possible beginning of one is held back."""

    def __init__(self, special: SpecialTokens) -> None:
        self._special = special
        self._held = ""

    def feed(self, text: str) -> str:
        special = self._special
        if not special.texts:
            return text
        text, at, kept = self._held + text, 0, list[str]()
        for start, end in special.spans(text):
            kept.append(text[at:start])
            at = end
        longest = min(special.longest - 1, len(text) - at)
        held = next((size for size in range(longest, 0, -1) if text[-size:] in special.beginnings), 0)
        end = len(text) - held
        self._held = text[end:]
        return "".join([*kept, text[at:end]])

    def end(self) -> str:
        """The held text was no special token."""
        held, self._held = self._held, ""
        return held


_ESCAPE_BYTES = 5
KEPT_TEMPLATES = 16
"""Templates from requests."""
END_TOKENS = 64
"""Characters of a prompt's end, to see what a template has begun there."""

logger = logging.getLogger(__name__)

_MARK = "\u2047 is it"
"""A text that no template has."""


class Prompts:
    """Raises ApiError 400 for wrong requests."""

    def __init__(self, bundle: TokenizerBundle) -> None:
        self.bundle = bundle
        self._templates = [text for text in (bundle.chat_template, bundle.tool_template) if text is not None]
        self._tokenizer = Tokenizer.from_str(bundle.tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._cached = CachedTokenizer(self._tokenizer, bundle.tokenizer_json)
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._pool = TemplatePool()
        self._template = ChatTemplate.from_bundle(bundle, self._pool)
        named = {} if bundle.media is None else bundle.media.placeholders
        self.placeholders: dict[int, str] = {self.ids_of(text)[0]: kind for kind, text in named.items()}
        """The tokens that stand for an image or video each, and of which kind."""
        self._given = functools.lru_cache(KEPT_TEMPLATES)(self._template_of)
        self._inline_system: dict[bool, bool] = {}
        keys = _keys(bundle)
        self._token_bytes = [] if keys is None else keys.token_bytes
        self._least_tokens = _least_tokens(keys)

    def close(self) -> None:
        self._pool.close()

    def check_place(self, given: str | None) -> None:
        """Raises NeedsWorkerError for a request's own template, if reading it here would delay others."""
        if given is not None and on_event_loop():
            raise NeedsWorkerError

    def template_reads(self, name: str) -> bool:
        """Whether the model's chat template reads a variable or member `name`."""
        return name in self._read_names

    @functools.cached_property
    def _read_names(self) -> frozenset[str]:
        return frozenset[str]().union(*map(_names_read, self._templates))

    def takes_inline_system(self, *, must_show: bool) -> bool:
        """Whether the chat template accepts a system message inside a chat; `must_show`: and prints it."""
        known = self._inline_system.get(must_show)
        if known is None:
            known = self._template is not None and takes_inline_system(self._template, must_show=must_show)
            self._inline_system[must_show] = known
        return known

    def variables(self, given: str | None = None) -> Set[str]:
        """The variables that the model's chat templates read, or the `given` one, as `chat_template_kwargs` set them. A
        given template is analysed each time."""
        return self._variables if given is None else _variables_of(given)

    @functools.cached_property
    def _variables(self) -> frozenset[str]:
        return frozenset[str]().union(*map(_variables_of, self._templates))

    def of_chat(self, body: Mapping[str, Any], limits: Limits | None = None, namespace: str | None = None) -> list[int]:
        """A chat's token ids, as `with_media`. Refuses images, too, whose tokens are unknown until they are decoded."""
        ids, media = self.with_media(body, limits, namespace)
        if media:
            raise unsupported(media[0].param, "only texts are supported here, not images")
        return ids

    def with_media(
        self, body: Mapping[str, Any], limits: Limits | None = None, namespace: str | None = None
    ) -> tuple[list[int], tuple[MediaPart, ...]]:
        """A chat's token ids, with a placeholder for each of its images; and these. `limits`: a prompt that is
        certainly too long is refused untokenized. `namespace`: the prompt's, so that timing reveals nothing of
        others'."""
        given = body.get("chat_template")
        self.check_place(given)
        template, names = (self._template, self._read_names) if given is None else self._given(namespace, given)
        if template is None:
            raise wrong(
                "messages", "This model has no chat template: send a text ('prompt', or 'input') in place of messages"
            )
        check_messages(body.get("messages"), names.__contains__)
        if body.get("documents") and "documents" not in names:
            ignore("documents")
        return self._rendered(body, limits, "messages", namespace, template)

    @functools.cached_property
    def in_texts(self) -> dict[str, str]:
        """What the chat template writes for an item of each kind, which a prompt without messages has too; where that
        can be told."""
        made = dict[str, str]()
        for kind in self.placeholders.values() if self._template is not None else ():
            try:
                before, mark, after = self._text_of().partition(_MARK)
                shown = self._text_of({f"{kind}_url": "data:"})
            except (PromptError, TemplateError):
                continue
            text = shown.removeprefix(before).removesuffix(mark + after)
            if text and shown == before + text + mark + after:
                made[kind] = text
        return made

    def _text_of(self, *parts: dict[str, Any]) -> str:
        assert self._template is not None
        said = [*parts, {"type": "text", "text": _MARK}]
        return prompt_of_chat({"messages": [{"role": "user", "content": said}]}, self._template).text or ""

    def _template_of(self, _namespace: str | None, source: str) -> tuple[ChatTemplate, Set[str]]:
        """A request's own template and the names it reads, cached per isolated client."""
        try:
            made = ChatTemplate(
                source,
                special_tokens=self.bundle.special_tokens,
                pool=self._pool,
                inline_seconds=0,
                placeholders={} if self.bundle.media is None else self.bundle.media.in_templates,
            )
        except TemplateError as error:
            raise invalid("chat_template", str(error)) from None
        return made, _names_read(source)

    def _rendered(
        self,
        body: Mapping[str, Any],
        limits: Limits | None,
        param: str,
        namespace: str | None,
        template: ChatTemplate,
    ) -> tuple[list[int], tuple[MediaPart, ...]]:
        try:
            prompt = prompt_of_chat(body, template)
        except PromptError as error:
            raise invalid(error.param, str(error), code=None) from None
        except TemplateBusyError as error:
            raise ApiError(503, f"{error}; try again later") from None
        except TemplateError as error:
            if template is not self._template:
                raise invalid("chat_template", str(error).replace("the model's chat", "the chat")) from None
            raise ApiError(500, f"The model's chat template failed: {error}") from None
        return self._ids(prompt, limits, param, namespace), prompt.media

    def of_prompts(
        self,
        prompts: Sequence[Prompt],
        limits: Limits | None = None,
        param: str = "prompt",
        namespace: str | None = None,
    ) -> list[list[int]]:
        """Each prompt's ids; together at most `MAX_PROMPT_TOKENS`, or one context. Their `media` are counted alone."""
        return self._together((self._ids(prompt, limits, param, namespace) for prompt in prompts), limits, param)

    @property
    def knows_pairs(self) -> bool:
        """Whether the chat template has places for a query and a document, as rerankers' do."""
        return self._template is not None and self.template_reads("query") and self.template_reads("document")

    def of_pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        limits: Limits | None = None,
        param: str = "documents",
        namespace: str | None = None,
        *,
        instruct: str | None = None,
        add_generation_prompt: bool = False,
    ) -> list[list[int]]:
        """The ids of each query with its document: as messages with these roles if the chat template has them
        (`instruct` as system), else joined by the tokenizer. The same total limit as above."""
        if self.knows_pairs and self._template is not None:
            head = [] if instruct is None else [{"role": "system", "content": instruct}]
            chats = (
                [*head, {"role": "query", "content": query}, {"role": "document", "content": document}]
                for query, document in pairs
            )
            asked = ({"messages": chat, "add_generation_prompt": add_generation_prompt} for chat in chats)
            template = self._template
            made = (self._rendered(one, limits, param, namespace, template)[0] for one in asked)
            return self._together(made, limits, param)
        if instruct is not None:
            raise wrong("instruct", "'instruct' needs a chat template with roles query and document")
        return self._together((self._joined(*pair, limits, param) for pair in pairs), limits, param)

    def _joined(self, query: str, document: str, limits: Limits | None, param: str) -> list[int]:
        self._check_length(query, limits, param)
        self._check_length(document, limits, param)
        ids: list[int] = self._tokenizer.encode_batch_fast([(query, document)])[0].ids
        return ids

    def _together(self, lists: Iterable[list[int]], limits: Limits | None, param: str) -> list[list[int]]:
        most = max(MAX_PROMPT_TOKENS, limits.max_request_tokens if limits is not None else 0)
        made, total = list[list[int]](), 0
        for ids in lists:
            made.append(ids)
            total += len(ids)
            if total > most:
                raise wrong(param, f"The prompts have more than {most} tokens together; send fewer in one request")
        return made

    def _ids(self, prompt: Prompt, limits: Limits | None, param: str, namespace: str | None) -> list[int]:
        if prompt.ids is None:
            text = prompt.text or ""
            if prompt.media and self.bundle.media is not None:
                text = self.bundle.media.expanded(text)
            self._check_length(text, limits, param)
            ids = self._cached.encode(text, add_special_tokens=prompt.add_special_tokens, namespace=namespace)
        elif max(prompt.ids) >= self.vocab_size:
            raise wrong(param, f"Token id {max(prompt.ids)} is not below {self.vocab_size}, the vocabulary's size")
        else:
            ids = prompt.ids
        for id, kind in self.placeholders.items():
            if (found := ids.count(id)) != (items := sum(one.kind == kind for one in prompt.media)):
                raise wrong(
                    param,
                    f"The prompt has {found} placeholders ({self._tokenizer.id_to_token(id)}) for {items} items of "
                    f"kind {kind!r}: a text must not contain one, and the chat template must write one for each",
                )
        return ids

    def _check_length(self, text: str, limits: Limits | None, param: str) -> None:
        """Raises ApiError if it is certainly too long."""
        if limits is not None and len(text) > INLINE_BYTES and self._least_tokens is not None:
            least = self._least_tokens(text)
            if least > limits.max_request_tokens:
                raise limits.too_long(f"your prompt has at least {least} tokens. Please shorten it.", param)

    def shown_ids(self, request: GenerateReq) -> list[int]:
        """A prompt's ids for its client: an item's are its placeholder's, as often as it has tokens."""
        ids, of_kind = list(request.input_ids), {kind: id for id, kind in self.placeholders.items()}
        for item in request.items:
            ids[item.start : item.start + item.count] = [of_kind[item.kind]] * item.count
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def ids_of(self, text: str) -> list[int]:
        """Tokenizes a text that stands inside another, so without special tokens around it."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def end_of(self, ids: Sequence[int]) -> str:
        """The end of the ids' text, special tokens included."""
        return self.decode(ids[-END_TOKENS:], skip_special_tokens=False)

    @functools.cached_property
    def special_tokens(self) -> SpecialTokens:
        """The tokens that `skip_special_tokens` removes, and those that end turns."""
        added = self._tokenizer.get_added_tokens_decoder()
        return SpecialTokens((*STRAYS, *(token.content for token in added.values() if token.special)))

    def token_of(self, text: str) -> int | None:
        """The id of the token with exactly this text, if there is one."""
        id: int | None = self._tokenizer.token_to_id(text)
        return id

    def bytes_of(self, id: int, text: str) -> list[int]:
        """A token's bytes as OpenAI reports them: exact even for part of a character."""
        raw = self._raw(id)
        return list(text.encode() if raw is None else raw)

    def chars_of(self, id: int, text: str, *, skip_special_tokens: bool) -> int:
        """Counts the characters that begin in a token; `text` is the token's own text."""
        raw = self._raw(id)
        if raw is not None:
            return sum(byte & 0xC0 != 0x80 for byte in raw)
        return 0 if skip_special_tokens and id in self._special else len(text)

    def size_of(self, ids: Sequence[int]) -> int:
        """The most bytes that `decode` makes of known ids."""
        sizes = self._decoded_sizes
        return sum([sizes[id] for id in ids])

    @functools.cached_property
    def drops_first_space(self) -> bool:
        """Whether the decoder drops the first token's leading space (as SentencePiece does)."""
        found = next((id for id, raw in enumerate(self._token_bytes) if raw[:1] == b" " and raw != b" "), None)
        return found is not None and not self.decode([found], skip_special_tokens=False).startswith(" ")

    @functools.cached_property
    def _special(self) -> frozenset[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(id for id, token in added.items() if token.special)

    @functools.cached_property
    def _decoded_sizes(self) -> list[int]:
        sizes = [0] * self.vocab_size
        for token, id in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if id < len(sizes):
                # a byte of a byte-level token that is not UTF-8 becomes U+FFFD, of three bytes
                sizes[id] = 3 * len(token.encode())
        return sizes

    def _raw(self, id: int) -> bytes | None:
        """An ordinary token's bytes; None for special ones and unknown ids."""
        raw = self._token_bytes[id] if id < len(self._token_bytes) else b""
        special = not raw or (len(raw) == _ESCAPE_BYTES and raw[0] == 0xFF)
        return None if special else raw


def _least_tokens(keys: PrefixKeys | None) -> Callable[[str], int] | None:
    """A lower bound of a text's tokens, without tokenizing it; about 2 ms a megabyte. A text's key
    (`treeline_wire.keys`) is the concatenation of its tokens' keys, so they are at least its length / the longest's.

    None for tokenizers that lose text: their unknown tokens stand for any length."""
    if keys is None or not keys.token_bytes:
        return None
    try:
        keys.self_test()
    except KeySelfTestError as error:
        logger.info("long prompts are tokenized before they are refused: %s", error)
        return None
    longest = max(_ESCAPE_BYTES, *map(len, keys.token_bytes))
    return lambda text: len(keys.prompt_key(text, add_special_tokens=False)) // longest


def _keys(bundle: TokenizerBundle) -> PrefixKeys | None:
    try:
        return PrefixKeys.from_bundle(bundle)
    except BundleError as error:
        logger.info("the bytes of tokens are unknown: %s", error)
        return None


def _names_read(template: str) -> set[str]:
    """The variables and members that a template reads: `name`, `x.name`, `x["name"]`, `"name" in x`, and names passed
    to a filter or method (`x.get("name")`, `map(attribute="name")`)."""
    try:
        tree = TemplateEnvironment().parse(template)
    except jinja2.TemplateSyntaxError:
        return set()  # it reads nothing: every chat is answered with the error
    names = {node.name for node in tree.find_all(nodes.Name) if node.ctx == "load"}
    names |= {node.attr for node in tree.find_all(nodes.Getattr)}
    looked_up: list[nodes.Node] = [node.arg for node in tree.find_all(nodes.Getitem)]
    looked_up += tree.find_all(nodes.Compare)
    calls: list[nodes.Call | nodes.Filter] = [*tree.find_all(nodes.Call), *tree.find_all(nodes.Filter)]
    for call in calls:
        looked_up += [*call.args, *call.kwargs]
    for node in looked_up:
        constants = [node] if isinstance(node, nodes.Const) else node.find_all(nodes.Const)
        names |= {constant.value for constant in constants if isinstance(constant.value, str)}
    return names


def _variables_of(template: str) -> set[str]:
    try:
        return meta.find_undeclared_variables(TemplateEnvironment().parse(template))
    except (jinja2.TemplateError, RecursionError):
        return set()
