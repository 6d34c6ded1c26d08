"""Starts, watches and ends the tasks of a host, and finds out why they ended."""
