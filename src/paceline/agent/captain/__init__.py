"""The captain: decides for the run. A state machine without I/O."""
