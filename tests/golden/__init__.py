"""Golden files: a recording of what the objects of a run received for many command lines and machines, to compare a changed chain with.

``python -m tests.golden.record --help`` says how to record; `tests.golden.compare` says how two recordings are compared.
"""
