"""What a run has achieved and used: its report and its metrics."""
