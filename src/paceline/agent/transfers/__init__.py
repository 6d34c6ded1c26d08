"""Snapshots and logs on their way between a host and the store, by a process of their own."""
