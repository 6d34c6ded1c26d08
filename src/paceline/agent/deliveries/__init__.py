"""Deliveries to external servers, in a process of its own: notifications, and metrics for experiment tracking."""
