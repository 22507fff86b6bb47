"""Exit codes that several commands share; 0 is success, 1 an error, 2 a wrong request."""

INCOMPLETE = 3
"""Some of the work has no result: tasks of an evaluation or a data set whose episodes all failed, checks without time."""
INTERRUPTED = 130
"""A signal ended the command."""
