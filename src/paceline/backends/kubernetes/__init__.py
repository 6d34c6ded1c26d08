"""Runs on a cluster: hosts are pods with the user's own image, created by Jobs that the cluster itself manages."""
