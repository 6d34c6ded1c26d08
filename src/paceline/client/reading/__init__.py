"""Finds runs, keeps their folders up to date, and reads them: status, events, output and numbers."""
