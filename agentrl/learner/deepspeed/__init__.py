"""Back-end of the learner: DeepSpeed, with ZeRO over any number of ranks."""
