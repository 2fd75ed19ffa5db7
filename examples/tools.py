"""A model that calls a function: it names the tool and writes the arguments, Python runs it, the model answers.

    pip install openai
    python examples/tools.py --url http://127.0.0.1:8080

`tool_choice` holds even a tiny model to a call that fits the schema. With a larger one, "auto" lets it decide.
"""

import argparse
import json

from openai import OpenAI

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--url", default="http://127.0.0.1:8080")
client = OpenAI(base_url=parser.parse_args().url + "/v1", api_key="none")
model = client.models.list().data[0].id


def weather(city: str, unit: str) -> str:
    return f"It is 18 degrees {unit} in {city}."


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city, now.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Rome", "Tokyo"]},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
messages = [{"role": "user", "content": "What is the weather in Paris?"}]
asked = {"model": model, "tools": [TOOL], "temperature": 0, "max_tokens": 200}
answer = client.chat.completions.create(messages=messages, tool_choice="required", **asked).choices[0]
call = answer.message.tool_calls[0]
arguments = json.loads(call.function.arguments)
print(answer.finish_reason, call.function.name, sorted(arguments))

result = weather(**arguments)
messages += [answer.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
last = client.chat.completions.create(messages=messages, tool_choice="none", **asked).choices[0].message
print("The tool said:", result)
print("The model says:", last.content)

# Prints:
# tool_calls weather ['city', 'unit']
# The tool said: It is 18 degrees … in ….
# The model says: …
