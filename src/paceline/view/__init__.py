"""Readers of a run's folder: its events, state, logs and report, as data and as text."""
