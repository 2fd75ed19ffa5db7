"""Tree of thought: several next steps are proposed, the model rates each, and the best one is followed.

    pip install 'treeline-llm[lang]'
    python examples/tree_of_thought.py --url http://127.0.0.1:8080

Each branch goes on from its parent's text, which the server has in its cache, so a wide tree
costs little more than a line.
"""

import argparse

from treeline_lang import RuntimeEndpoint, function, gen, select

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--url", default="http://127.0.0.1:8080")
url = parser.parse_args().url

WIDTH, DEPTH = 3, 2
VERDICTS = [" good", " bad"]


@function
def thought(s, question):
    s += "You solve problems in small steps, and look at each of them before you go on.\nQuestion: " + question + "\n"
    for step in range(1, DEPTH + 1):
        branches = s.fork(WIDTH)
        branches += lambda i, n=step: f"Step {n}, idea {i + 1}: " + gen("idea", max_tokens=12, stop="\n")
        branches += "\nThis idea is" + select("verdict", VERDICTS)
        rated = [branch.get_meta_info("verdict")["scores"][" good"] for branch in branches]
        best = max(range(WIDTH), key=rated.__getitem__)
        hits = [branch.get_meta_info("idea")["cached_tokens"] for branch in branches]
        branches.join()
        s += f"Step {step}: {s['idea'][best].strip()}\n"
        print(f"step {step}: {len(set(s['idea']))} different ideas, took number {best + 1};",
              f"{sum(hit > 0 for hit in hits)} of {WIDTH} found their beginning in the cache")  # fmt: skip
    s += "So the answer is " + gen("answer", max_tokens=12, stop="\n")


with RuntimeEndpoint(url) as backend:
    state = thought.run(question="What is the capital of the country where the Seine flows?", backend=backend)
    print("answer:", repr(state["answer"]))

# Prints:
# step 1: … different ideas, took number …; 3 of 3 found their beginning in the cache
# step 2: … different ideas, took number …; 3 of 3 found their beginning in the cache
# answer: …
