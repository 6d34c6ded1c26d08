"""Runs on a cluster: submit, follow, mirror to a local folder, list and end them."""
