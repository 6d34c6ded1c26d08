"""Opens, lists and restores a run's snapshots."""
