"""Paceline's own process on a host: starts, watches and ends its tasks. Standard library only, Python 3.9+."""
