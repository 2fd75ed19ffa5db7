# %% [markdown]
# # Extraction, compiled
#
# Records are taken out of texts: a few examples come first, then the text, and each field is generated under its own
# constraint. The program has no `if` that depends on what the model says, so it can be compiled:
# recorded once as a graph, and run without the function. It runs here on an engine in this process, without a server.

# %%
import json
from pathlib import Path

from treeline_lang import EngineBackend, function, gen
from treeline_runtime import Engine

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny"
engine = Engine(model=MODEL, context_length=2048)
backend = EngineBackend(engine)

# %% [markdown]
# ## The program
# Arguments are appended with `+`: what a compiled program knows of them is where they go.

# %%
EXAMPLES = """Text: Ada is 36 years old and lives in Paris.
{"name": "Ada", "age": 36, "city": "Paris"}
Text: Bob, a man of 54, lives in Rome.
{"name": "Bob", "age": 54, "city": "Rome"}
"""


@function
def record(s, text):
    s += EXAMPLES
    s += "Text: " + text + "\n"
    with s.var_scope("record"):
        s += '{"name": "' + gen("name", regex="[A-Z][a-z]{1,10}", max_tokens=8) + '", "age": '
        s += gen("age", regex="[1-9][0-9]", max_tokens=4) + ', "city": "'
        s += gen("city", regex="[A-Z][a-z]{1,10}", max_tokens=8) + '"}'


# %% [markdown]
# ## Interpreted and compiled
# Both do the same. `fallback` would say why a program cannot be compiled, and on which line.

# %%
compiled = record.compile()
print("fallback:", compiled.fallback)
texts = ["Eve is 41 years old and lives in Tokyo.", "Max, a man of 28, lives in Cairo."]
items = [{"text": text} for text in texts]
interpreted = record.run_batch(items, backend=backend, temperature=0)
states = compiled.run_batch(items, backend=backend, temperature=0)
print("the same:", [state["record"] for state in interpreted] == [state["record"] for state in states])
print("fields:", sorted(json.loads(states[0]["record"])))

# %% [markdown]
# ## What the examples cost
# They are computed once, for the first text; every other program finds them in the cache.

# %%
print("found in the cache:", states[1].get_meta_info("name")["cached_tokens"] > 40)

engine.close()
# Prints:
# fallback: None
# the same: True
# fields: ['age', 'city', 'name']
# found in the cache: True
