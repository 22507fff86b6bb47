"""Tools: typed functions that the model may call."""
