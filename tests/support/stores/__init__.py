"""Object stores on loopback for tests (S3, Google, Azure), and faults between client and store; see fixtures.py."""
