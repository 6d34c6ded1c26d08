"""Deliveries to servers of others, in a process of its own: notifications, and numbers for experiment tracking."""
