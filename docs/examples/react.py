# %% [markdown]
# # An agent with tools
#
# The program and the model take turns: the model writes which tool it wants, held to a form by a regex, the program
# calls a Python function, and its result goes back into the same text. Each call finds all of the text so far in the
# server's prefix cache.
#
# Start a server first: `treeline serve models/tiny --port 30000`. The model is tiny, so the questions are
# simple; with a larger one the program is the same. Cells are marked as in notebooks; it runs as a script, too.

# %%
import os
import re

from treeline_lang import RuntimeEndpoint, assistant, function, gen, select, user

backend = RuntimeEndpoint(os.environ.get("TREELINE_URL", "http://127.0.0.1:30000"))

# %% [markdown]
# ## Tools
# Plain functions of one text each.

# %%
FACTS = {"France": "67 million people", "Italy": "59 million people", "Japan": "124 million people"}


def look_up(country: str) -> str:
    return FACTS.get(country.strip(), "nothing is known")


def add(terms: str) -> str:
    return str(sum(int(term) for term in re.findall(r"\d+", terms)))


TOOLS = {"look_up": look_up, "add": add}

# %% [markdown]
# ## The program
# `select` decides which tool, by likelihood. The argument is generated under a regex, so that it can be parsed without
# doubt. Python decides when to stop: that is data-dependent control flow, which the interpreter runs as it is.


# %%
@function
def agent(s, question, tools, steps=1):
    s += "Question: " + question + "\n"
    for number in range(steps):
        s += f"Step {number + 1}. The best tool is "
        s += select(f"tool_{number}", tools)
        s += " of " + gen(f"argument_{number}", regex=r"[A-Za-z0-9 +]{1,12}", stop="\n", max_tokens=6)
        result = TOOLS[s[f"tool_{number}"]](s[f"argument_{number}"])
        s += "\nObservation: " + result + "\n"
    return result


state = agent.run(question="How many people live in France?", tools=list(TOOLS), backend=backend, temperature=0)
print(state["tool_0"] in TOOLS, state.text().endswith(f"Observation: {state.ret_value}\n"))

# %% [markdown]
# ## A chat with a tool
# In chats the tool's result is a turn of the user. The final answer is streamed.


# %%
@function
def assistant_with_sum(s, a, b):
    s += user("What is " + str(a) + " plus " + str(b) + "?")
    s += assistant(gen("guess", max_tokens=16))
    checked = add(f"{a} + {b}")
    s.set_var("right", checked in s["guess"])
    s += user("What color is the sky?")
    s += assistant(gen("last", max_tokens=16))


state = assistant_with_sum.run(a=17, b=25, backend=backend, temperature=0, stream=True)
for piece in state.text_iter("last"):
    print(piece, end="")
print()
print("the sum is right:", state["right"])

# %% [markdown]
# ## What the cache did
# The second call of a chat begins with all of the first: `cached_tokens` says how much of it was not computed again.

# %%
first, last = state.get_meta_info("guess"), state.get_meta_info("last")
print("found in the cache:", last["cached_tokens"] >= first["prompt_tokens"] // 16 * 16)

backend.close()
# Prints:
# True True
# The sky is blue.
# the sum is right: True
# found in the cache: True
