"""The keyer of a model's tokenizer and chat template."""

from __future__ import annotations

from treeline_wire.chat import TemplateError
from treeline_wire.keys import KeySelfTestError, PrefixKeys, escape
from treeline_wire.normalization import long_run
from treeline_wire.prompt import Prompt
from treeline_wire.tokenizer import TokenizerBundle

from treeline_epp.keyers.base import TokenLengths
from treeline_epp.keyers.learnt_chats import LearntTemplate
from treeline_epp.keyers.made_apart import proven_keys
from treeline_epp.keyers.rendering import RENDER_SECONDS, BoundedRenderer
from treeline_epp.keyers.shares import Owner
from treeline_epp.keyers.token_keys import TokenKeys


class PromptKeyer(TokenLengths):
    """Turns requests into prefix keys for one tokenizer and its chat template.

    Where the tokenizer loses text, prompts are tokenized here (`token_keys`); `keys` is `None` where that cannot be
    done either (`problem` says why): requests are then routed by history. Making one blocks: for seconds, where the
    tokenizer is large. `renderer` is `None` then, or where there is
    no chat template.
    """

    def __init__(self, bundle: TokenizerBundle) -> None:
        super().__init__()
        self.fingerprint = bundle.fingerprint
        self.problem: str | None = None
        self.keys: PrefixKeys | None = None
        self.renderer: BoundedRenderer | None = None
        try:
            self.keys = proven_keys(bundle.tokenizer_json)
        except (KeySelfTestError, ValueError) as error:
            self._use_tokens(bundle, error)
        long_run("é")  # makes its tables, which no request should wait for
        template: LearntTemplate | None = None
        try:
            template = LearntTemplate.from_bundle(bundle, inline_seconds=RENDER_SECONDS)
        except TemplateError as error:
            self.problem = f"chat requests have no prefix key with tokenizer {bundle.fingerprint}: {error}"
        if template is not None and template.not_inline is not None:
            self.problem = (
                f"chat requests have no prefix key with tokenizer {bundle.fingerprint}: its chat template is not a "
                f"plain one ({template.not_inline}), and is not rendered here"
            )
        if template is not None and self.keys is not None:
            self.renderer = BoundedRenderer(template)

    def _use_tokens(self, bundle: TokenizerBundle, no_text: ValueError) -> None:
        try:
            keys = TokenKeys.from_bundle(bundle)
            keys.self_test()
        except (KeySelfTestError, ValueError) as error:
            self.problem = f"no prefix keys for tokenizer {bundle.fingerprint}: {no_text}; by tokens: {error}"
        else:
            self.problem = f"prompts are tokenized here for tokenizer {bundle.fingerprint}, which takes time: {no_text}"
            self.bytes_per_token = float(len(escape(0)))
            self.keys = keys

    def affordable(self, prompt: Prompt, namespace: str | None = None, client: Owner = None) -> Prompt:
        """The prompt, or as much of its beginning as has a key in short time."""
        return self.keys.affordable(prompt, namespace, client) if isinstance(self.keys, TokenKeys) else prompt

    @property
    def by_tokens(self) -> bool:
        """Whether keys are made of token ids."""
        return isinstance(self.keys, TokenKeys)

    def key(self, prompt: Prompt, namespace: str | None = None) -> bytes | None:
        """The key of a prompt; `None` without keys."""
        if isinstance(self.keys, TokenKeys) and prompt.ids is None:
            return self.keys.prompt_key(prompt.text or "", prompt.add_special_tokens, namespace)
        return None if self.keys is None else self.keys.prompt_key_of(prompt)
