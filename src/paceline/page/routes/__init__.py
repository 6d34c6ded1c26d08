"""What the page answers about a run."""
