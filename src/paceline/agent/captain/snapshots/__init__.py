"""The captain's part in snapshots: which are committed, kept and evaluated, and when the whole group saves. No I/O."""
