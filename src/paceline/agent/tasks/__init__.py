"""Starts, monitors and ends the tasks of a host, and determines why they ended."""
