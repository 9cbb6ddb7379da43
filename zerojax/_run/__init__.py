"""Several processes: how they start, agree, end together, and go on without one."""
