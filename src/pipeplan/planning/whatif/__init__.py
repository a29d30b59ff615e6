"""What a change of the cluster costs or buys: the old plan on it, and a new one."""
