"""Code shared by tests: runs, users, worlds, recorded runs, object stores (`stores`), Kubernetes clusters (`lab`)."""
