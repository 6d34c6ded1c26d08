"""Data that is built once, before training: its files, its fingerprint, and the lease of the run that builds it."""
