"""Networking of agents: the event loop, framed messages, TLS, name lookup."""
