"""Weight-synchronisation schemes: one file per scheme."""
