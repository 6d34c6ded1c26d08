"""Backends start the hosts of a run: on this machine or on a Kubernetes cluster."""
