"""Where tasks come from, and the order in which they are drawn."""
