"""Object stores on loopback for tests (S3, Google, Azure), and faults on the way to them; see fixtures.py."""
