"""`asyncsync relay`: one subscription per host, or per branch of a tree, passed on to the workers there."""
