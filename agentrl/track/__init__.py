"""Records and views of a run: metrics, trajectories, terminal display, summary; and the callbacks of the user."""
