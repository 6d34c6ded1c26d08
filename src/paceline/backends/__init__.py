"""Where hosts are started: on this machine now, on Kubernetes later."""
