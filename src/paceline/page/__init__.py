"""`paceline page`: the runs of this machine and of clusters, shown in a browser."""
