"""Models measured on tasks: during training, alone, and against each other."""
