"""Paceline's own process on a host: starts, monitors and ends its tasks. Standard library only, Python 3.9+."""
