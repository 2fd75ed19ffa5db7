"""`treeline program`: runs a program from a file, or shows it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from treeline_wire.command_line import Parser

from treeline_lang.backends.runtime import RuntimeEndpoint
from treeline_lang.compiler.draw import outline
from treeline_lang.errors import ProgramError, ProgramFileError, WrongArgument
from treeline_lang.program import Compiled
from treeline_lang.state import ProgramState

OK, FAILED, WRONG = 0, 1, 2
_EPILOG = """\
The server's key, if it wants one, is read from TREELINE_API_KEY.

exit status: 0; 1 if a step of the program failed; 2 if the command or the file is wrong
"""


def _parser(prog: str) -> argparse.ArgumentParser:
    top = Parser(prog=prog, description="Programs of the frontend language that were saved with Compiled.save.")
    words = top.add_subparsers(dest="word", required=True, metavar="WORD")
    run = words.add_parser(
        "run",
        help="run a program, and print what it returns",
        description="Runs a program, and prints what it returns, or else its variables, or else its text.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("file", type=Path, metavar="FILE", help="a program, as Compiled.save wrote it")
    run.add_argument("--url", required=True, help="of a runtime, or of a gateway")
    run.add_argument("--arg", action="append", default=[], metavar="NAME=TEXT", help="an argument that is a text")
    run.add_argument("--json-arg", action="append", default=[], metavar="NAME=JSON", help="one that is something else")
    run.add_argument("--temperature", type=float, metavar="T", help="where the program says none")
    run.add_argument("--max-new-tokens", type=int, metavar="N", help="where the program says none")
    run.add_argument("--model", help="where several are served behind the URL")
    run.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="for each request (600)")
    run.add_argument("--json", action="store_true", help="print text, variables, messages and what it returns as JSON")
    show = words.add_parser(
        "show",
        help="print a program's steps, or draw them",
        description="Prints a program's streams and steps; none is run.",
    )
    show.add_argument("file", type=Path, metavar="FILE", help="a program, as Compiled.save wrote it")
    show.add_argument("--svg", type=Path, metavar="OUT", help="draw it into this file instead")
    return top


def main(argv: Sequence[str] | None = None, prog: str = "python -m treeline_lang") -> int:
    """Returns the exit status; a wrong command line exits with 2, as argparse does."""
    parser = _parser(prog)
    options = parser.parse_args(argv)
    try:
        return _run(options) if options.word == "run" else _show(options)
    except ProgramFileError as error:
        return _complain(prog, f"{options.file}: {error}", WRONG)
    except WrongArgument as error:
        return _complain(prog, str(error), WRONG)
    except ProgramError as error:
        return _complain(prog, f"{type(error).__name__}: {error}", FAILED)
    except (TypeError, ValueError) as error:
        return _complain(prog, str(error), WRONG)
    except BrokenPipeError:  # the reader has gone; what is flushed when the process ends must not fail, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        return _complain(prog, f"{error.filename or options.file}: {error.strerror or error}", WRONG)


def _complain(prog: str, reason: str, status: int) -> int:
    shown = "".join(one if one.isprintable() or one == "\n" else "\ufffd" for one in reason)  # servers say it, too
    sys.stderr.write(f"{prog}: error: {shown}\n")
    return status


def _print(text: str) -> None:
    """Half of a character, which a server's JSON can have, is shown as one that is not known."""
    sys.stdout.write(text.encode(errors="replace").decode() + "\n")
    sys.stdout.flush()


def _run(options: argparse.Namespace) -> int:
    program = Compiled.load(options.file)
    arguments = _arguments(options.arg, options.json_arg)
    asked = {"temperature": options.temperature, "max_new_tokens": options.max_new_tokens}
    sampling = program.split({name: value for name, value in asked.items() if value is not None})[1]
    bound = program.arguments((), arguments)
    with RuntimeEndpoint(options.url, model=options.model, timeout_s=options.timeout) as backend:
        state = program.start(program.new_run(backend, sampling), bound, waits=True)
        text, variables = state.text(), state.variables
        if options.json:
            shown = {"text": text, "variables": variables, "messages": state.messages(), "returned": state.ret_value}
            _print(_json(shown))
        else:
            _print(_outcome(state.ret_value, variables, text))
    return OK


def _outcome(returned: Any, variables: dict[str, Any], text: str) -> str:
    """What the program has come to: what it returns, or else what it has set, or else its text."""
    if returned is None and not variables:
        return text
    if returned is None:
        returned = variables if len(variables) > 1 else next(iter(variables.values()))
    return returned if isinstance(returned, str) else _json(returned)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=_other)


def _other(value: Any) -> Any:
    """How a value is shown that JSON does not have."""
    return value.text() if isinstance(value, ProgramState) else str(value)


def _arguments(texts: Sequence[str], others: Sequence[str]) -> dict[str, Any]:
    """Raises ValueError."""
    found: dict[str, Any] = {}
    for flag, given in (*(("--arg", text) for text in texts), *(("--json-arg", other) for other in others)):
        name, equals, value = given.partition("=")
        if not equals or not name:
            raise ValueError(f"{flag} {given}: not NAME=VALUE")
        if name in found:
            raise ValueError(f"{flag} {given}: {name} is given twice")
        try:
            found[name] = value if flag == "--arg" else json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{flag} {given[:200]}: not JSON: {error}") from None
    return found


def _show(options: argparse.Namespace) -> int:
    program = Compiled.load(options.file)
    assert program.graph is not None
    if options.svg is not None:
        options.svg.write_text(program.graph.draw(), encoding="utf-8")
    else:
        _print(outline(program.graph))
    return OK
