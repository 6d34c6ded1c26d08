"""Transfers of snapshots and logs between a host and the store, in a separate process."""
