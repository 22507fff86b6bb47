"""Plants bugs one at a time, and reports those that no test notices: ``python -m tests.mutants``."""
