"""Snapshots of a run in a store: their contents, which of them are current, and which may be deleted."""
