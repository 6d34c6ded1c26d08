"""Connections, requests and responses of the page, whatever they are about."""
