"""Memory and time of a run on given GPUs, computed from its settings and the sizes of its model; nothing heavy is imported."""
