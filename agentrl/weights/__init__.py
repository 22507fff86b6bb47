"""How bytes move from the learner to engines."""
