"""The repairs of `envs/swe.py` with a prompt of one word, for a model that learns its bugs from chats and rewards."""

from agentrl.assets.envs.swe import Swe


class ShortSwe(Swe):
    """The same repositories, tools, sandboxes and hidden tests; the prompt is the name of the module, and describes no tools."""

    prompt = "{module}"
    tool_prompt = ""
