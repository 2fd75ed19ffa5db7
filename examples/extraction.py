"""Extraction, compiled: records out of texts, each field under its own constraint, without a server.

    pip install 'treeline-llm[runtime,lang]'
    python examples/extraction.py --model models/tiny       # a folder, or a name on the Hugging Face Hub

The program has no `if` that depends on the model, so it can be compiled: recorded once as a graph, and run as such.
"""

import argparse
import json

from treeline_lang import EngineBackend, function, gen
from treeline_runtime import Engine

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", default="models/tiny")
engine = Engine(model=parser.parse_args().model, context_length=2048)
backend = EngineBackend(engine)

SHOWN = """Text: Ada is 36 years old and lives in Paris.
{"name": "Ada", "age": 36, "city": "Paris"}
Text: Bob, a man of 54, lives in Rome.
{"name": "Bob", "age": 54, "city": "Rome"}
"""


@function
def record(s, text):
    s += SHOWN
    s += "Text: " + text + "\n"  # with `+`: a compiled program knows of an argument only where it goes
    with s.var_scope("record"):
        s += '{"name": "' + gen("name", regex="[A-Z][a-z]{1,10}", max_tokens=8) + '", "age": '
        s += gen("age", regex="[1-9][0-9]", max_tokens=4) + ', "city": "'
        s += gen("city", regex="[A-Z][a-z]{1,10}", max_tokens=8) + '"}'


compiled = record.compile()
print("fallback:", compiled.fallback)  # why it cannot be compiled, and on which line
items = [{"text": "Eve is 41 years old and lives in Tokyo."}, {"text": "Max, a man of 28, lives in Cairo."}]
interpreted = record.run_batch(items, backend=backend, temperature=0)
states = compiled.run_batch(items, backend=backend, temperature=0)
print("the same:", [state["record"] for state in interpreted] == [state["record"] for state in states])
print("fields:", sorted(json.loads(states[0]["record"])))
print("examples found in the cache:", states[1].get_meta_info("name")["cached_tokens"] > 40)
engine.close()

# Prints:
# fallback: None
# the same: True
# fields: ['age', 'city', 'name']
# examples found in the cache: True
