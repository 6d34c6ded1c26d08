"""Storage of snapshots, logs and data. Standard library only: agents use it."""
