"""Renders the Kubernetes objects of a run and of a served model as data; pure functions."""
