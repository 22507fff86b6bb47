"""The commands for Python code: ``train``, ``evaluate``, ``check`` and ``load_run``, and the wiring of a run."""
