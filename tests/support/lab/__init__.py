"""A real Kubernetes cluster of several nodes on one machine, for tests: from pinned sources, in its own namespaces."""
