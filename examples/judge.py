"""A panel that answers and a judge that decides: branches of one state, then a choice by likelihood.

pip install 'treeline-llm[lang]'
python examples/judge.py --url http://127.0.0.1:8080
"""

import argparse
from collections import Counter

from treeline_lang import RuntimeEndpoint, assistant, function, gen, select, system, user

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--url", default="http://127.0.0.1:8080")
url = parser.parse_args().url

WORDINGS = ("What is the capital of {}?", "Tell me the capital of {}.", "Which city is the capital of {}?")


@function
def panel(s, country):
    s += system("You are a helpful assistant.")
    branches = s.fork(len(WORDINGS))  # the server computes their common text once
    branches += lambda i: user(WORDINGS[i].format(country)) + assistant(gen("answer", max_tokens=20))
    branches.join()
    return Counter(answer.removesuffix(".").split()[-1] for answer in s["answer"]).most_common(1)[0]


@function
def judged(s, country, claim, city):
    s += user("What is the capital of " + country + "?")
    s += assistant("The capital of " + country + " is" + select("city", [" " + claim, " " + city]))
    return s["city"].strip() == claim


with RuntimeEndpoint(url) as backend:
    city, votes = panel.run(country="Japan", backend=backend, temperature=0).ret_value
    print(city, "with", votes, "votes")
    print("Rome, says somebody:", judged.run(country="Japan", claim="Rome", city=city, backend=backend).ret_value)

    # A batch: programs with the same beginning come one after another, and what all share is sent ahead.
    countries = ["France", "Italy", "Spain", "Egypt"]
    states = panel.run_batch([{"country": country} for country in countries], backend=backend, temperature=0)
    for country, state in zip(countries, states, strict=True):
        print(f"{country}: {state.ret_value[0]}")

# Prints:
# Tokyo with 3 votes
# Rome, says somebody: False
# France: Paris
# Italy: Rome
# Spain: Madrid
# Egypt: Cairo
