"""Waits for runs, stops and deletes them."""
