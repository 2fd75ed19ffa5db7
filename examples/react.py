"""An agent (ReAct): the model names a tool, Python runs it, its result goes back into the same text.

    pip install 'treeline-llm[lang]'
    python examples/react.py --url http://127.0.0.1:8080

Each call finds all of the text so far in the server's cache.
"""

import argparse
import re

from treeline_lang import RuntimeEndpoint, function, gen, select

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--url", default="http://127.0.0.1:8080")
url = parser.parse_args().url

FACTS = {"France": "67 million people", "Italy": "59 million people", "Japan": "124 million people"}


def look_up(country: str) -> str:
    return FACTS.get(country.strip(), "nothing is known")


def add(terms: str) -> str:
    return str(sum(int(term) for term in re.findall(r"\d+", terms)))


TOOLS = {"look_up": look_up, "add": add}


@function
def agent(s, question, tools, steps):
    s += (
        "You answer questions with tools. After each step you see what the tool returned.\nQuestion: " + question + "\n"
    )
    for number in range(1, steps + 1):
        s += f"Step {number}. The best tool is "
        s += select(f"tool_{number}", tools)  # the likelier one: no text to parse
        s += " of " + gen(f"argument_{number}", regex=r"[A-Za-z0-9 +]{1,12}", stop="\n", max_tokens=6)
        result = TOOLS[s[f"tool_{number}"]](s[f"argument_{number}"])
        s += "\nObservation: " + result + "\n"
    s += "Answer: " + gen("answer", max_tokens=16, stop="\n")


with RuntimeEndpoint(url) as backend:
    state = agent.run(
        question="How many people live in France?", tools=list(TOOLS), steps=2, backend=backend, temperature=0
    )
    for number in (1, 2):
        used = state.get_meta_info(f"argument_{number}")["cached_tokens"]
        print(f"step {number}: a known tool: {state[f'tool_{number}'] in TOOLS}; from the cache: {used > 0}")
    print("observations:", state.text().count("Observation: "))

# Prints:
# step 1: a known tool: True; from the cache: True
# step 2: a known tool: True; from the cache: True
# observations: 2
