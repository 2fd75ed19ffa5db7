"""A chat of two turns, streamed. The second turn begins with all of the first, so the server finds that in its cache.

pip install openai
python examples/chat.py --url http://127.0.0.1:8080      # `treeline up` serves there
"""

import argparse

from openai import OpenAI

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--url", default="http://127.0.0.1:8080")
client = OpenAI(base_url=parser.parse_args().url + "/v1", api_key="none")
model = client.models.list().data[0].id

# A long beginning, as real assistants have: what the cache saves is the time to read it again.
rules = " ".join(f"Rule {number}: be kind, be brief, and answer in English." for number in range(1, 31))
messages = [{"role": "system", "content": rules}]

for question in ("What is the capital of France?", "What is 17 + 25?"):
    messages.append({"role": "user", "content": question})
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        temperature=0,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    answer = ""
    for chunk in stream:
        if chunk.choices:
            answer += chunk.choices[0].delta.content or ""
        if chunk.usage:
            usage = chunk.usage
    messages.append({"role": "assistant", "content": answer})
    print(f"{question} {answer}")
    print(f"  {usage.prompt_tokens_details.cached_tokens} of {usage.prompt_tokens} prompt tokens were in the cache")

# Prints:
# What is the capital of France? The capital of France is Paris.
#   0 of … prompt tokens were in the cache
# What is 17 + 25? 17 + 25 = 42
#   … of … prompt tokens were in the cache
