"""Score many texts: a label of a fixed list for each, with its probability, many requests at once.

pip install openai
python examples/batch_scoring.py --url http://127.0.0.1:8080 < texts.txt      # a text a line
"""

import argparse
import asyncio
import math
import sys

from openai import AsyncOpenAI

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--url", default="http://127.0.0.1:8080")
parser.add_argument("--concurrency", type=int, default=16, help="requests at one time")
options = parser.parse_args()

LABELS = ["praise", "complaint", "question"]
HEAD = "You sort messages of customers. Answer with one word: " + ", ".join(LABELS) + ".\n"  # shared: cached


async def score(client: AsyncOpenAI, model: str, free: asyncio.Semaphore, text: str) -> tuple[str, float]:
    async with free:
        done = await client.completions.create(
            model=model,
            prompt=f"{HEAD}Message: {text}\nKind: ",
            max_tokens=8,
            temperature=0,
            logprobs=1,
            extra_body={"choice": LABELS},  # the output is one of them, and nothing else
        )
    choice = done.choices[0]
    return choice.text, math.exp(sum(choice.logprobs.token_logprobs))


async def main() -> None:
    texts = [line.strip() for line in sys.stdin if line.strip()]
    free = asyncio.Semaphore(options.concurrency)
    async with AsyncOpenAI(base_url=options.url + "/v1", api_key="none") as client:
        model = (await client.models.list()).data[0].id
        scored = await asyncio.gather(*(score(client, model, free, text) for text in texts))
    for text, (label, probability) in zip(texts, scored, strict=True):
        print(f"{label}\t{probability:.2f}\t{text}")


asyncio.run(main())

# Reads:
# The parcel came a day early, thank you!
# My order is broken.
# Where is my invoice?
# Prints:
# …	…	The parcel came a day early, thank you!
# …	…	My order is broken.
# …	…	Where is my invoice?
