"""Causes for which a run does not learn: hypotheses, each tested on what the run recorded, and the report that they add up to."""
