"""The archives that are sent to a cluster: the agent, the job's code, the library for buckets."""
