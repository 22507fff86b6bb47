"""Runs read again: episodes, replay, comparison, play, export."""
