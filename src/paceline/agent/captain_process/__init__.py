"""The captain's process: connections, the clock, and files."""
