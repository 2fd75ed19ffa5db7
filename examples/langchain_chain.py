"""LangChain: a chain of a prompt, our server and a parser, then structured output and a batch.

pip install langchain-openai
python examples/langchain_chain.py --url http://127.0.0.1:8080
"""

import argparse

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from openai import OpenAI
from pydantic import BaseModel, Field

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--url", default="http://127.0.0.1:8080")
server = {"base_url": parser.parse_args().url + "/v1", "api_key": "none"}
name = OpenAI(**server).models.list().data[0].id

model = ChatOpenAI(model=name, temperature=0, max_tokens=64, **server)
prompt = ChatPromptTemplate([("system", "You are a helpful assistant."), ("user", "What is the capital of {country}?")])
chain = prompt | model | StrOutputParser()

print("".join(chain.stream({"country": "France"})))
print(chain.batch([{"country": "Italy"}, {"country": "Japan"}]))


class Sum(BaseModel):
    """The sum of two numbers."""

    result: int = Field(ge=0, le=999)


print(type(model.with_structured_output(Sum, method="json_schema").invoke("What is 4 plus 5?")).__name__)

# Prints:
# The capital of France is Paris.
# ['The capital of Italy is Rome.', 'The capital of Japan is Tokyo.']
# Sum
