"""`treeline chat`: its arguments, its commands, and one question after the other."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console
from rich.text import Text
from treeline_wire import ports
from treeline_wire.command_line import Parser

from treeline.chat.answer import Answer, AnswerReader, Piece
from treeline.chat.client import KEYS, ChatError, Client
from treeline.chat.conversation import Conversation

EPILOG = f"""\
examples:
  treeline chat                              with what `treeline up` serves
  treeline chat http://gpu-3:8000            with any server of OpenAI's API: vLLM, SGLang, llama.cpp, ...
  treeline chat Qwen/Qwen3-0.6B              starts a server of the model for as long as the chat lasts
  treeline chat ./models/mine -- --dtype bfloat16    the same, with arguments for `treeline serve`
  echo "What is 17 + 25?" | treeline chat    prints the answer alone

A key for the server is taken from {KEYS[0]}, else {KEYS[1]}. Type /help in the chat for its commands."""

HELP = """\
/system TEXT   set the system prompt; without TEXT, show it
/retry         ask the last question again
/clear         forget the conversation, not the system prompt
/save FILE     write the conversation: to FILE.json as messages, else as Markdown
/help          this list
/exit          leave; so do Ctrl-D, and Ctrl-C twice

Enter sends, Alt-Enter begins a new line, Ctrl-C stops an answer.
To send a line that begins with /, put a space before it."""
NO_QUESTION = "standard input has no question: echo QUESTION | treeline chat, or call it in a terminal"
COMMANDS = [line.split()[0] for line in HELP.splitlines() if line.startswith("/")]


def parser() -> argparse.ArgumentParser:
    chat = Parser(
        prog="treeline chat",
        usage="%(prog)s [OPTIONS] [URL | MODEL] [-- ARGUMENTS OF treeline serve]",
        description="Chat in the terminal with a server of OpenAI's API, or with a model for which one is started.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    chat.add_argument(
        "target",
        nargs="?",
        default=f"http://127.0.0.1:{ports.GATEWAY}",
        metavar="URL | MODEL",
        help="a server, or a checkpoint folder, a Hugging Face id, or tiny (default: %(default)s)",
    )
    chat.add_argument(
        "--model", metavar="NAME", help="of the server's models (default: its only one, else you are asked)"
    )
    chat.add_argument("--system", metavar="TEXT", default="", help="system prompt")
    chat.add_argument("--temperature", type=_temperature, metavar="T", help="0 = always the likeliest token")
    chat.add_argument("--max-tokens", type=_positive, metavar="N", help="longest answer")
    return chat


def _temperature(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")


def _positive(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")


def main(argv: Sequence[str]) -> int:
    """Chat until the user leaves; if standard input is not a terminal, answer it as one question. Status 1: no
    answer."""
    own, serve_args = _split(list(argv))
    arguments = parser()
    args = arguments.parse_args(own)
    is_url = _is_url(args.target)
    if serve_args and is_url:
        arguments.error("arguments behind -- are for a server that is started: name a MODEL, not a URL")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)  # runs every `finally`: a server that we started must end
    errors = Console(stderr=True, highlight=False)
    try:
        with contextlib.ExitStack() as stack:
            check = _nothing
            url = args.target if "://" in args.target else f"http://{args.target}"
            if not is_url:
                from treeline.chat.local_server import LocalServer

                server = stack.enter_context(LocalServer(args.target, serve_args, errors))
                url, check = server.url, server.check
            client = stack.enter_context(Client(url))
            return _chat(client, args, check)
    except ChatError as error:
        errors.print(Text(f"treeline chat: error: {error}", style="red"), soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]


def _is_url(target: str) -> bool:
    """Whether the target is a URL or `host:port`; else it is a model."""
    host, colon, port = target.partition("/")[0].rpartition(":")
    return "://" in target or (bool(host and colon) and port.isdecimal())


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _nothing() -> None:
    """The check of a server that we did not start: none."""


def _chat(client: Client, args: argparse.Namespace, check: Callable[[], None]) -> int:
    """check: raises ChatError if the server that we started has ended."""
    settings = {"temperature": args.temperature, "max_tokens": args.max_tokens}
    body = {key: value for key, value in settings.items() if value is not None}
    conversation = Conversation(args.system)
    if sys.stdin is None:  # closed by who started us
        raise ChatError(NO_QUESTION)
    if sys.stdin.isatty() and sys.stdout.isatty():
        console = Console(highlight=False)
        model = args.model or _only(client.models(), lambda models: _chosen(models, console))
        return Chat(client, {"model": model, **body}, conversation, console, check).run()
    if not (question := sys.stdin.buffer.read().decode(errors="replace").strip()):
        raise ChatError(NO_QUESTION)
    model = args.model or _only(client.models(), _refuse_several)
    _answer_once(client, {"model": model, **body, "messages": conversation.ask(question)})
    return 0


def _only(models: list[str], choose: Callable[[list[str]], str]) -> str:
    """The server's model; `choose` where it has several."""
    if not models:
        raise ChatError("the server lists no models: name one with --model")
    return models[0] if len(models) == 1 else choose(models)


def _refuse_several(models: list[str]) -> str:
    raise ChatError(f"the server has several models: {', '.join(models)}: name one with --model")


def _chosen(models: list[str], console: Console) -> str:
    for number, name in enumerate(models, 1):
        console.print(Text(f"{number:>3}  {name}"))
    while True:
        try:
            said = input("which model? ").strip()
        except EOFError:
            raise KeyboardInterrupt from None
        if said in models:
            return said
        if said.isdecimal() and 1 <= int(said) <= len(models):
            return models[int(said) - 1]
        console.print(f"a number from 1 to {len(models)}, or a name")


def _answer_once(client: Client, body: dict[str, Any]) -> None:
    """The answer alone on standard output, for pipes."""
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    reader = AnswerReader()
    try:
        for piece in client.ask(body, reader):
            if piece.kind == "text":
                sys.stdout.write(piece.text)
                sys.stdout.flush()
    finally:
        if reader.answer.text and not reader.answer.text.endswith("\n"):
            sys.stdout.write("\n")
    for line in _calls(reader.answer):
        print(line, file=sys.stderr)


def _calls(answer: Answer) -> list[str]:
    return [f"calls {call.name}({call.arguments})" for call in answer.calls.values()]


class Chat:
    """The chat at a terminal."""

    def __init__(
        self,
        client: Client,
        body: dict[str, Any],
        conversation: Conversation,
        console: Console,
        check: Callable[[], None],
    ) -> None:
        """body: the fields of every request besides its messages. check: raises ChatError if the server that we started
        has ended."""
        self._client, self._body, self._conversation, self._console = client, body, conversation, console
        self._check = check

    def run(self) -> int:
        """Until the user leaves; returns the exit status."""
        from treeline.chat.prompt import Prompt

        prompt = Prompt(COMMANDS)
        self._note(f"{self._body['model']} on {self._client.url}. /help has the commands, Ctrl-D leaves.")
        was_interrupted = False
        while True:
            try:
                line = prompt.ask()
            except EOFError:
                return 0
            except KeyboardInterrupt:
                if was_interrupted:
                    return 0
                was_interrupted = True
                self._note("Ctrl-C again leaves.")
                continue
            try:
                was_interrupted = False
                if line.startswith("/"):
                    if not self._obey(line):
                        return 0
                elif line.strip():
                    self._ask(line.strip())
            except KeyboardInterrupt:
                was_interrupted = True

    def _obey(self, line: str) -> bool:
        """A command; False: to leave."""
        command, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        match command:
            case "/exit":
                return False
            case "/help":
                self._console.print(Text(HELP))
            case "/system":
                if rest:
                    self._conversation.system = rest
                self._note(f"system prompt: {self._conversation.system or 'none'}")
            case "/clear":
                self._conversation.clear()
                self._note("forgotten")
            case "/retry":
                if question := self._conversation.take_back():
                    self._ask(question)
                else:
                    self._wrong("there is no question yet")
            case "/save":
                self._save(rest)
            case _:
                self._wrong(f"{command} is no command; there are {', '.join(COMMANDS)}")
        return True

    def _save(self, name: str) -> None:
        if not name:
            self._wrong("/save wants the name of a file")
            return
        path = Path(name).expanduser()
        text = self._conversation.as_json() if path.suffix == ".json" else self._conversation.as_markdown()
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            self._wrong(f"{path} is there already: take another name")
        except OSError as error:
            self._wrong(f"cannot write {path}: {error.strerror}")
        else:
            self._note(f"saved to {path}")

    def _ask(self, question: str) -> None:
        from treeline.chat.view import AnswerView

        messages = self._conversation.ask(question)
        reader, clock = AnswerReader(), Clock()
        pieces = self._client.ask({**self._body, "messages": messages}, reader)
        view = AnswerView(self._console)
        try:
            try:
                view.start()
                for piece in clock.timing(pieces):
                    view.add(piece)
            finally:
                view.stop()
                pieces.close()
        except ChatError as error:
            self._check()
            self._wrong(f"{error} (/retry asks again)")
        except KeyboardInterrupt:
            self._note("stopped")
            raise
        finally:
            self._conversation.answered(reader.answer.text)
        for line in _calls(reader.answer):
            self._console.print(Text(line, style="cyan"))
        if told := clock.summary(reader.answer):
            self._note(told)

    def _note(self, text: str) -> None:
        self._console.print(Text(text, style="dim"))

    def _wrong(self, text: str) -> None:
        self._console.print(Text(text, style="red"))


class Clock:
    """The times of an answer: first and last token."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._first = self._last = 0.0

    def timing(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            self._last = time.perf_counter()
            self._first = self._first or self._last
            yield piece

    def summary(self, answer: Answer) -> str:
        """One line about the answer, with the facts that are known."""
        usage, facts = answer.usage, []
        if self._first:
            facts.append(f"first token after {self._first - self._began:.2f} s")
        if usage.output is not None and usage.output > 1 and self._last > self._first:
            facts.append(f"{(usage.output - 1) / (self._last - self._first):.0f} tokens/s")
        if usage.prompt is not None:
            cached = "" if usage.cached is None else f" ({usage.cached} cached)"
            facts.append(f"{usage.prompt} prompt tokens{cached}")
        if answer.replica:
            facts.append(answer.replica)
        if answer.finish_reason == "length":
            facts.append("cut off: the longest answer is reached")
        return ", ".join(facts)
