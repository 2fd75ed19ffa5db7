"""Answers from documents (RAG): find the best ones, put them before the question, ask.

    pip install openai
    python examples/rag.py --url http://127.0.0.1:8080

The documents that were found stand in a fixed order and before the question, so that questions about the same documents
share their beginning, which the server then has in its cache.
"""

import argparse
import re

from openai import OpenAI

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--url", default="http://127.0.0.1:8080")
client = OpenAI(base_url=parser.parse_args().url + "/v1", api_key="none")
model = client.models.list().data[0].id

DOCUMENTS = [
    "Paris is the capital of France. The Seine flows through it, and the Louvre stands on its right bank.",
    "Rome lies in Italy. The Tiber flows through it, and the Colosseum stands in its middle.",
    "Lyon is a city of France where the Rhone and the Saone meet. It is known for its kitchens and its silk.",
    "A radix tree stores texts by their common beginnings; a cache can be looked up in it by prefix.",
]


def words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]{4,}", text.lower()))


def retrieve(question: str, count: int = 2) -> list[str]:
    """The documents with the most words in common. In earnest this is an index; see embeddings_search.py."""
    ranked = sorted(range(len(DOCUMENTS)), key=lambda i: -len(words(question) & words(DOCUMENTS[i])))
    return [DOCUMENTS[i] for i in sorted(ranked[:count])]


for question in ("What is the capital of France?", "Which city of France is known for silk, if not its capital?"):
    found = retrieve(question)
    messages = [
        {"role": "system", "content": "Answer from these documents alone:\n" + "\n".join(found)},
        {"role": "user", "content": question},
    ]
    done = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=24)
    print([text.split()[0] for text in found], done.choices[0].message.content)
    print("  from the cache:", done.usage.prompt_tokens_details.cached_tokens > 0)

# Prints:
# ['Paris', 'Lyon'] …
#   from the cache: False
# ['Paris', 'Lyon'] …
#   from the cache: True
