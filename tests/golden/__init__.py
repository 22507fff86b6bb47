"""Golden files: a recording of what the objects of a run receive, for many command lines on simulated machines.

They say whether a change of the chain from settings to objects changes what arrives there. A case (`cases`, ``named.txt``) is a command
line; a machine is simulated at the places that agentrl asks (`machines`), Ray by objects of this process (`ray_stub`), and engines, workers
and learner ranks by objects that record what they are made with (`standins`). Everything between is the real code. `edges` lists the names
of agentrl at which a recording begins; a change that moves one of them changes that file. Paths, dates and addresses are masked (`values`).

``python -m tests.golden check`` compares all cases with ``data/golden.jsonl.xz``, as the slow test does, and ``show NAME`` prints one.
Where a field has moved or gone, `compare.MOVES` says so. ``write`` records everything anew: only where the golden files themselves are to
change. ``python -m tests.golden.documented`` and ``python -m tests.golden.drawing`` make the lists of command lines anew.

Not recorded is what engines, workers and learner ranks make of what they receive: arguments of vLLM, the configuration of DeepSpeed,
parsers of tool calls, the context length of a started engine.
"""
