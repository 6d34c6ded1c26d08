"""Metrics of a run for Prometheus: what they are, their text, and the server at the captain."""
