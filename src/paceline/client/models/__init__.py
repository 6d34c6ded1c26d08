"""Exports and serves the models of runs, and runs the programs of jobs."""
