"""Numbers of a run over time."""
