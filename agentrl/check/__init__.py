"""Checks of an environment: it is played without a model, and its errors come back as findings.

`rules.toml` lists everything that can be found. The checks run in a process of their own (`run`), which a
supervisor watches (`supervise`), because an environment may hang, crash or change the process it lives in.
"""
