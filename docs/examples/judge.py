# %% [markdown]
# # A panel that answers, and a judge that decides
#
# One question is asked in several ways at once: branches of one state, which share its prefix. A judge reads what they
# said and decides with `select`, so that its verdict is one of the two words and nothing else. The whole is run over
# many questions in one batch.
#
# Start a server first: `treeline serve models/tiny --port 30000`.

# %%
import os
from collections import Counter

from treeline_lang import RuntimeEndpoint, assistant, function, gen, select, system, user

backend = RuntimeEndpoint(os.environ.get("TREELINE_URL", "http://127.0.0.1:30000"))

# %% [markdown]
# ## Branches
# Each branch goes on from the same text. `fork` has the server compute that text once, before the branches ask for it.

# %%
WORDINGS = ("What is the capital of {}?", "Tell me the capital of {}.", "Which city is the capital of {}?")


@function
def panel(s, country):
    s += system("You are a helpful assistant.")
    branches = s.fork(len(WORDINGS))
    branches += lambda i: user(WORDINGS[i].format(country)) + assistant(gen("answer", max_tokens=20))
    branches.join()
    return Counter(answer.removesuffix(".").split()[-1] for answer in s["answer"]).most_common(1)[0]


city, votes = panel.run(country="Japan", backend=backend, temperature=0).ret_value
print(city, "with", votes, "votes")

# %% [markdown]
# ## A judge
# The likelier of the two words, given all that was said. The scores are in the meta info.


# %%
@function
def judged(s, country, claim):
    s += user("What is the capital of " + country + "?")
    s += assistant("The capital of " + country + " is" + select("city", [" " + claim, " " + city]))
    return s["city"].strip() == claim


state = judged.run(country="Japan", claim="Rome", backend=backend)
print("the claim holds:", state.ret_value)

# %% [markdown]
# ## Many questions
# `run_batch` starts the programs so that those with the same beginning come one after another, and sends what all have
# in common ahead.

# %%
countries = ["France", "Italy", "Spain", "Japan", "Egypt", "Greece"]
states = panel.run_batch([{"country": country} for country in countries], backend=backend, temperature=0)
for country, state in zip(countries, states, strict=True):
    print(f"{country}: {state.ret_value[0]}")

backend.close()
# Prints:
# Tokyo with 3 votes
# the claim holds: False
# France: Paris
# Italy: Rome
# Spain: Madrid
# Japan: Tokyo
# Egypt: Cairo
# Greece: Athens
