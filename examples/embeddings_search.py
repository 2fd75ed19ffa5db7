"""Search by meaning: a vector for each text, and the nearest ones to a question.

pip install openai
treeline serve tiny --task embed --port 8000     # or Qwen/Qwen3-Embedding-0.6B
python examples/embeddings_search.py --url http://127.0.0.1:8000
"""

import argparse

from openai import OpenAI

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--url", default="http://127.0.0.1:8000")
client = OpenAI(base_url=parser.parse_args().url + "/v1", api_key="none")
model = client.models.list().data[0].id

TEXTS = [
    "The capital of France is Paris.",
    "The capital of Italy is Rome.",
    "17 + 25 = 42",
    "The sky is blue.",
]


def embed(texts: list[str]) -> list[list[float]]:
    return [item.embedding for item in client.embeddings.create(model=model, input=texts).data]


def nearest(question: str, vectors: list[list[float]]) -> list[tuple[float, str]]:
    """Vectors have length 1, so the product of two is the cosine of their angle."""
    [wanted] = embed([question])
    return sorted(
        ((sum(a * b for a, b in zip(wanted, v, strict=True)), t) for v, t in zip(vectors, TEXTS, strict=True)),
        reverse=True,
    )


vectors = embed(TEXTS)
print(len(vectors), "texts,", len(vectors[0]), "numbers each")
for question in ("The capital of Italy is Rome.", "What is the sum of 17 and 25?"):
    print(question)
    for similarity, text in nearest(question, vectors)[:2]:
        print(f"  {similarity:.2f} {text}")

# Prints:
# 4 texts, 256 numbers each
# The capital of Italy is Rome.
#   1.00 The capital of Italy is Rome.
#   0.… …
# What is the sum of 17 and 25?
#   … …
#   … …
