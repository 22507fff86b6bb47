"""What a run leaves behind and what a person sees of it: metrics, recordings, the terminal display, the summary."""
