"""Back-end of the learner: PyTorch alone, on one rank."""
