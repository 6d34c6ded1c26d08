"""Plans jobs and starts runs of them, on this machine or on a cluster."""
