"""Schemes of environments that end after one answer: ``reward:URL``, judged by servers, and ``answer:``, judged by reward models."""

from __future__ import annotations

from agentrl.env.rewards.answers import load_answer
from agentrl.env.rewards.server import load_reward_servers
from agentrl.suites.scheme import Scheme

REWARD_SERVERS = Scheme(name="reward", load=load_reward_servers, is_remote=True)
ANSWER = Scheme(name="answer", load=load_answer)
