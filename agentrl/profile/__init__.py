"""Times of a recorded run, and predictions for other sizes."""
