"""The chat template of an engine in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from treeline_wire.chat import ChatTemplate, TemplateError
from treeline_wire.tokenizer import BundleError, TokenizerBundle

from treeline_runtime.models.config import ModelError
from treeline_runtime.templates.pool import TemplatePool


class EngineChats:
    """Renders chats. A template that is not trusted to end is rendered by another process, started when it is needed
    and ended by `close`."""

    def __init__(self, model: str) -> None:
        """Raises ModelError for a model without a chat template."""
        try:
            bundle = TokenizerBundle.from_dir(model)
            self._pool = TemplatePool()
            template = ChatTemplate.from_bundle(bundle, self._pool)
        except (BundleError, TemplateError) as error:
            raise ModelError(f"{model}: {error}") from None
        if template is None:
            raise ModelError(f"{model} has no chat template")
        self._template = template

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """Also in the thread of a running event loop, which waits for it. Raises TemplateError."""
        with ThreadPoolExecutor(max_workers=1) as thread:  # where a loop runs, the template would refuse to wait
            rendered = thread.submit(self._template.render, messages, add_generation_prompt=add_generation_prompt)
            return rendered.result()

    def close(self) -> None:
        self._pool.close()
