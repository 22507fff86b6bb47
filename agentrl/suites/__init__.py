"""Schemes of ``--agent``, each with its facts; environments of other projects; the loader of agents."""
