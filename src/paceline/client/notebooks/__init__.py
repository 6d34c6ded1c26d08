"""What a notebook shows of runs."""
