"""Types, protocols and errors that every layer shares; imports no heavy library."""
