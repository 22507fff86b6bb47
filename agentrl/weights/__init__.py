"""Transfer of weights from the learner to engines."""
