"""The captain, which coordinates the run: a state machine without I/O."""
