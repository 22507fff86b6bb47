"""Running episodes and groups against an engine, token by token."""
