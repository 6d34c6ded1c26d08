"""What users can do with jobs and runs, as functions that print nothing and raise PacelineError."""
