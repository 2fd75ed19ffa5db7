"""Treeline's frontend language: programs of several model calls, written in Python.

    from treeline_lang import RuntimeEndpoint, assistant, function, gen, user

    @function
    def capital(s, country):
        s += user("What is the capital of " + country + "?")
        s += assistant(gen("answer", max_tokens=16))

    with RuntimeEndpoint("http://127.0.0.1:30000") as backend:
        print(capital.run(country="France", backend=backend)["answer"])

`docs/language.md` is the tutorial.
"""

from treeline_lang.backends.anthropic import Anthropic
from treeline_lang.backends.base import Backend, flush_cache, get_server_info, global_config, set_default_backend
from treeline_lang.backends.engine import EngineBackend
from treeline_lang.backends.local import Runtime
from treeline_lang.backends.openai import OpenAI
from treeline_lang.backends.runtime import RuntimeEndpoint
from treeline_lang.choices import (
    ChoicesDecision,
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from treeline_lang.compiler.graph import Graph
from treeline_lang.errors import (
    BackendError,
    Cancelled,
    ProgramError,
    Refused,
    RoleError,
    TemplateError,
    TraceError,
    UnknownVariable,
    Unmatched,
    Unreachable,
    Unsupported,
    WrongArgument,
    WrongType,
)
from treeline_lang.expressions import (
    Expr,
    assistant,
    assistant_begin,
    assistant_end,
    gen,
    gen_int,
    gen_string,
    image,
    select,
    separate_reasoning,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
    video,
)
from treeline_lang.program import Compiled, Function, function
from treeline_lang.sampling import REGEX_BOOL, REGEX_FLOAT, REGEX_INT, REGEX_STR
from treeline_lang.state import ProgramState, ProgramStateGroup

__all__ = [
    "REGEX_BOOL",
    "REGEX_FLOAT",
    "REGEX_INT",
    "REGEX_STR",
    "Anthropic",
    "Backend",
    "BackendError",
    "Cancelled",
    "ChoicesDecision",
    "Compiled",
    "EngineBackend",
    "Expr",
    "Function",
    "Graph",
    "OpenAI",
    "ProgramError",
    "ProgramState",
    "ProgramStateGroup",
    "Refused",
    "RoleError",
    "Runtime",
    "RuntimeEndpoint",
    "TemplateError",
    "TraceError",
    "UnknownVariable",
    "Unmatched",
    "Unreachable",
    "Unsupported",
    "WrongArgument",
    "WrongType",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "global_config",
    "greedy_token_selection",
    "image",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
]
