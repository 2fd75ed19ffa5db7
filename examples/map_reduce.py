"""Map and reduce: a question about each part of a long text, side by side, then one about all the answers.

pip install 'treeline-llm[lang]'
python examples/map_reduce.py --url http://127.0.0.1:8080
"""

import argparse

from treeline_lang import RuntimeEndpoint, assistant, function, gen, system, user

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--url", default="http://127.0.0.1:8080")
url = parser.parse_args().url

PARTS = [
    "France lies between the Atlantic and the Alps. Its capital is on the Seine.",
    "Italy is a long peninsula. Its capital is on the Tiber.",
    "Japan is a chain of islands. Its capital was once called Edo.",
]


@function
def asked(s, parts, question, together):
    s += system("You read reports. " * 8)  # all branches begin with this: it is computed once
    branches = s.fork(len(parts))
    branches += lambda i: user(parts[i] + " " + question) + assistant(gen("note", max_tokens=16))
    branches.join()  # s["note"] is now a list, in the order of the parts
    s += user(together + "\n" + "\n".join(f"{number}. {note}" for number, note in enumerate(s["note"], 1)))
    s += assistant(gen("whole", max_tokens=24))


with RuntimeEndpoint(url) as backend:
    state = asked.run(
        parts=PARTS,
        question="What is the capital of the country in this report?",
        together="Name the country of each line.",
        backend=backend,
        temperature=0,
    )
    for part, note in zip(PARTS, state["note"], strict=True):
        print(f"{part.split()[0]}: {note}")
    print("together:", state["whole"])
    print("the branches shared:", state.get_meta_info("note")[0]["cached_tokens"] > 0)

# Prints:
# France: …
# Italy: …
# Japan: …
# together: …
# the branches shared: True
