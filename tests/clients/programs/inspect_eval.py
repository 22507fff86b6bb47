"""Inspect's `eval` with its provider for a server of vLLM, or for any compatible one: `python inspect_eval.py vllm|openai-api PROMPT`."""

import os
import sys

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool


@tool
def add():
    async def execute(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: A number.
            b: Another one.
        """
        return a + b

    return execute


provider, prompt = sys.argv[1:]
service = {"vllm": "VLLM", "openai-api": "AGENTRL"}[provider]
os.environ[f"{service}_BASE_URL"] = os.environ["OPENAI_BASE_URL"]
os.environ[f"{service}_API_KEY"] = os.environ["OPENAI_API_KEY"]
model = {"vllm": "vllm/policy", "openai-api": "openai-api/agentrl/policy"}[provider]
task = Task(dataset=[Sample(input=prompt, target="three")], solver=[use_tools(add()), generate()], scorer=includes())
(log,) = eval(task, model=model, display="none", log_dir=os.path.join(os.environ["HOME"], "logs"))
if log.status != "success":
    sys.exit(str(log.error))
print(log.samples[0].scores["includes"].value, log.samples[0].output.completion)
