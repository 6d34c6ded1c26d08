"""What has happened in a run, from its events."""
