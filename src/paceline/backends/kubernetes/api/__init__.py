"""Requests to the API server of a cluster, and the interpretation of its responses."""
