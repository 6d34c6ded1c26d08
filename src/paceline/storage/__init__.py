"""Where snapshots are kept, and what makes one of them count. Standard library only: agents use it."""
