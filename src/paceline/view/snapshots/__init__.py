"""The snapshots of a run: where they are, and which there are."""
