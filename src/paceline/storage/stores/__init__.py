"""Stores: a folder, a bucket, or a folder of another process, all behind one protocol."""
