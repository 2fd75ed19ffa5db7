"""The user's input: editing, a history over chats, and questions of several lines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent


class Prompt:
    def __init__(self, commands: Sequence[str]) -> None:
        keys = KeyBindings()
        for pressed in (("escape", "enter"), ("escape", "c-j")):
            keys.add(*pressed)(_new_line)
        self._session: PromptSession[str] = PromptSession(
            [("bold", "> ")],
            history=_history(),
            key_bindings=keys,
            completer=WordCompleter(list(commands), sentence=True),
            complete_while_typing=Condition(lambda: get_app().current_buffer.text.startswith("/")),
            reserve_space_for_menu=len(commands),
        )

    def ask(self) -> str:
        """Raises KeyboardInterrupt for Ctrl-C, EOFError for Ctrl-D."""
        return self._session.prompt()


def _new_line(event: KeyPressEvent) -> None:
    event.current_buffer.insert_text("\n")


def _history() -> History:
    """The history of all chats of this user, which only they can read; of this chat alone if no file can be written."""
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "treeline"
    file = folder / "chat-history"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        with file.open("r+b"):
            return FileHistory(file)
    except (OSError, RuntimeError):  # RuntimeError: no home
        return InMemoryHistory()
