"""Answers that are objects of a class: the server holds the output to its JSON Schema, token by token.

pip install openai
python examples/json_schema.py --url http://127.0.0.1:8080
"""

import argparse
from enum import StrEnum

from openai import OpenAI
from pydantic import BaseModel, Field

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--url", default="http://127.0.0.1:8080")
client = OpenAI(base_url=parser.parse_args().url + "/v1", api_key="none")
model = client.models.list().data[0].id


class Colour(StrEnum):
    RED = "red"
    GREEN = "green"
    BLUE = "blue"


class Person(BaseModel):
    name: str = Field(pattern="^[A-Z][a-z]{1,12}$")
    age: int = Field(ge=0, le=120)
    colour: Colour


done = client.chat.completions.parse(
    model=model,
    messages=[{"role": "user", "content": "Give me a JSON object with name Ada and age 36 and colour blue."}],
    response_format=Person,
    temperature=0,
    max_tokens=64,
)
person = done.choices[0].message.parsed
print(type(person).__name__, sorted(person.model_dump()))
print("an age:", 0 <= person.age <= 120, "| a colour:", person.colour in Colour)

# Prints:
# Person ['age', 'colour', 'name']
# an age: True | a colour: True
