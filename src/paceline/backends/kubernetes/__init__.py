"""Runs on a cluster: hosts are pods of the person's own image, made by Jobs that the cluster itself keeps going."""
