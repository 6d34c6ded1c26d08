"""What tests share: runs, people, worlds, recorded runs, object stores (`stores`) and Kubernetes clusters (`lab`)."""
