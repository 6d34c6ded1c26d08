"""A real Kubernetes of several nodes on one machine, for tests: built from pinned sources, in namespaces of its own."""
