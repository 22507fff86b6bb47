"""Environments in processes of their own: one per episode, forked from a clean process that has loaded the user's file."""
