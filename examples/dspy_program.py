"""DSPy: a signature and a module on our server. A regex holds a small model to the format that DSPy reads.

pip install dspy
python examples/dspy_program.py --url http://127.0.0.1:8080
"""

import argparse
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else its client asks the internet for prices

import dspy
from openai import OpenAI

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--url", default="http://127.0.0.1:8080")
base = parser.parse_args().url + "/v1"
name = OpenAI(base_url=base, api_key="none").models.list().data[0].id

lm = dspy.LM(f"openai/{name}", api_base=base, api_key="none", max_tokens=96, temperature=0, cache=False)
dspy.configure(lm=lm, adapter=dspy.ChatAdapter(use_json_adapter_fallback=False))

# A large model writes this form by itself: leave `extra_body` out there.
WORDS = "[A-Z][A-Za-z ,.]{0,60}"
form = "".join(rf"\[\[ ## {field} ## \]\]\n{WORDS}\n" for field in ("reasoning", "answer"))
thought = dspy.ChainOfThought("question -> answer", extra_body={"regex": form + r"\[\[ ## completed ## \]\]"})

prediction = thought(question="What is the capital of France?")
print(sorted(prediction.keys()))
print("the answer is what the model wrote:", prediction.answer in lm.history[-1]["outputs"][0])

# Prints:
# ['answer', 'reasoning']
# the answer is what the model wrote: True
