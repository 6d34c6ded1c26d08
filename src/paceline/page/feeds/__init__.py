"""What is kept up to date while someone looks at it: runs, and the list of runs."""
