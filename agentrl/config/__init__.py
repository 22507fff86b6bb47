"""The configuration: schema, loader and checks."""
