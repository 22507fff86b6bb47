"""Times of a recorded run, alone and beside the plan that it was made with."""
