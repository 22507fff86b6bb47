"""Agent servers of NeMo Gym as black-box agents: ``--agent 'nemo-gym:http://HOST:PORT?form=agent&model_port=PORT'``.

An agent server runs a whole episode for one ``POST /run``. It asks the model server of its configuration, whose address is the same for all
episodes, and sends no key: a relay listens there, and passes each request on to the episode that its metadata name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, ClassVar

from agentrl.core.errors import EnvLoadError, RewardError
from agentrl.core.types import Task
from agentrl.env.agent import StepResult
from agentrl.env.black_box import BlackBoxAgent, ModelEndpoint
from agentrl.env.remote.wire import excerpt
from agentrl.env.responses import PARAMS, params_of
from agentrl.env.results import number
from agentrl.suites.specs import figures, server_url

MAX_BODY = 2**25


class NemoGymAgent(BlackBoxAgent):
    """One episode of an agent server. Tasks are rows of NeMo Gym's JSONL, given with ``--prompts``.

    Attributes:
        url: Address of the agent server.
        model_port: Port of the model server in the configuration of NeMo Gym, on which the relay listens.
        timeout_s: Deadline of ``/run``; the episode's own (``--episode-timeout-s``) holds besides.
    """

    url: ClassVar[str] = ""
    model_port: ClassVar[int] = 0
    timeout_s: ClassVar[float] = 3600.0

    async def run(self, task: Task, llm: ModelEndpoint) -> StepResult:
        """Have the server run the episode; `RewardError` if it gives no reward."""
        from agentrl.env.remote.http import HttpLimits, JsonClient
        from agentrl.suites.nemo_relay import KEY, relay

        row = dict(task.metadata)
        params = params_of(task)
        metadata = {**(params.get("metadata") or {}), KEY: f"{llm.base_url} {llm.api_key}"}
        limits = HttpLimits(timeout_s=self.timeout_s, attempt_timeout_s=self.timeout_s, max_bytes=MAX_BODY)
        async with relay(self.model_port), contextlib.aclosing(JsonClient([self.url], limits)) as client:
            # Not repeated, because the server may have played the episode already.
            reply = await client.call("POST", "/run", {**row, PARAMS: {**params, "metadata": metadata}}, repeat=False)
        answer = reply.json()
        if not isinstance(answer, Mapping) or answer.get("reward") is None:
            raise RewardError(f"{reply.url}: answered {excerpt(reply.text, 80)!r}, which is no object with a reward")
        if answer.get("mask_sample") is True:
            raise RewardError(f"{reply.url}: the server says that its reward measures nothing (mask_sample)")
        info = figures(answer, (*row, "reward"))
        return StepResult(number(answer["reward"], reply.url, "reward"), info=info, truncated=answer.get("truncated") is True)


def load_nemo_agent(spec: str, url: str, options: Mapping[str, Any]) -> type[NemoGymAgent]:
    """Return the class of an agent server; the options are `model_port` and `timeout_s`."""
    if unknown := [name for name in options if name not in ("model_port", "timeout_s")]:
        raise EnvLoadError("--agent", spec, f"an agent server has no option {unknown[0]!r}", "There is model_port and timeout_s.")
    port, timeout_s = options.get("model_port"), options.get("timeout_s", NemoGymAgent.timeout_s)
    if type(port) is not int or not 0 < port < 2**16:
        remedy = "Give model_port=PORT, the port of the model server in NeMo Gym's configuration."
        raise EnvLoadError("--agent", spec, f"model_port = {port!r} is no port", remedy)
    if not isinstance(timeout_s, int | float) or timeout_s <= 0:
        raise EnvLoadError("--agent", spec, f"timeout_s = {timeout_s!r} is out of range", "Give seconds.")
    checked = server_url(url, "nemo-gym:http://HOST:PORT?form=agent&model_port=PORT")
    body = {"url": checked, "model_port": port, "timeout_s": float(timeout_s), "__module__": __name__, "__doc__": NemoGymAgent.__doc__}
    return type("NemoAgent", (NemoGymAgent,), body)
