"""An agent of Harbor's that runs each answer of the model as a command, until the model says that it is done; for tests."""

import asyncio
import json
import os
import urllib.request

from harbor.agents.base import BaseAgent

MAX_TURNS = 4


class Commands(BaseAgent):
    """Works from Harbor's process."""

    @staticmethod
    def name():
        return "commands"

    def version(self):
        return "1"

    async def setup(self, environment):
        """Install nothing."""

    async def run(self, instruction, environment, context):
        messages = [{"role": "user", "content": instruction}]
        for _ in range(MAX_TURNS):
            answer = await asyncio.to_thread(ask, messages)
            if answer["content"].strip() == "DONE":
                return
            done = await environment.exec(answer["content"])
            messages += [answer, {"role": "user", "content": f"{done.stdout}{done.stderr}"}]


def ask(messages):
    """Return the model's answer."""
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)) as reply:
        return json.load(reply)["choices"][0]["message"]
