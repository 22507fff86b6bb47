"""The run itself: admission slots, first-in first-out queue, ledger, and the four loops that keep both sides busy."""

from agentrl.flow.driver import RunResult, train
from agentrl.flow.settings import FlowSettings, flow_settings, group_filter
from agentrl.flow.state import Observer

__all__ = ["FlowSettings", "Observer", "RunResult", "flow_settings", "group_filter", "train"]
