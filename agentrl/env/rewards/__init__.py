"""Rewards without an environment: functions, servers, verifiers."""
