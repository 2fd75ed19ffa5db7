"""The keyer of a model's tokenizer and chat template."""

from __future__ import annotations

from treeline_wire.chat import TemplateError
from treeline_wire.keys import PrefixKeys
from treeline_wire.normalization import long_run
from treeline_wire.prompt import Prompt
from treeline_wire.tokenizer import TokenizerBundle

from treeline_epp.keyers.base import TokenLengths
from treeline_epp.keyers.learnt_chats import LearntTemplate
from treeline_epp.keyers.made_apart import proven_keys
from treeline_epp.keyers.rendering import RENDER_SECONDS, BoundedRenderer


class PromptKeyer(TokenLengths):
    """Turns requests into prefix keys for one tokenizer and its chat template.

    `keys` is `None` where the tokenizer loses text (`problem` says how): requests are then routed by history.
    `renderer` is `None` then, or where there is no chat template. Making one blocks: for seconds, where the tokenizer
    is large.
    """

    def __init__(self, bundle: TokenizerBundle) -> None:
        super().__init__()
        self.fingerprint = bundle.fingerprint
        self.problem: str | None = None
        self.keys: PrefixKeys | None = None
        self.renderer: BoundedRenderer | None = None
        try:
            self.keys = proven_keys(bundle.tokenizer_json)
        except ValueError as error:
            self.problem = f"no prefix keys for tokenizer {bundle.fingerprint}: {error}"
            return
        long_run("é")  # makes its tables, which no request should wait for
        try:
            template = LearntTemplate.from_bundle(bundle, inline_seconds=RENDER_SECONDS)
        except TemplateError as error:
            self.problem = f"chat requests have no prefix key with tokenizer {bundle.fingerprint}: {error}"
            return
        if template is None:
            return
        if template.not_inline is not None:
            self.problem = (
                f"chat requests have no prefix key with tokenizer {bundle.fingerprint}: its chat template is not a "
                f"plain one ({template.not_inline}), and is not rendered here"
            )
        self.renderer = BoundedRenderer(template)

    def key(self, prompt: Prompt) -> bytes | None:
        """The key of a prompt; `None` without keys."""
        return None if self.keys is None else self.keys.prompt_key_of(prompt)
