"""Serves a model on a cluster."""
