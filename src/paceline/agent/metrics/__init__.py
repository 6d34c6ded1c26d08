"""Metrics of a run for Prometheus: what they are, their text, and the server that the captain gives it with."""
