"""Tasks of Harbor: in containers or in folders, played by our own loop, by an agent program, or by Harbor itself."""
