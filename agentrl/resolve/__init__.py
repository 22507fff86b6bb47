"""From what a user said to what a run does: settings, this machine and the model become one plan, in one place."""
