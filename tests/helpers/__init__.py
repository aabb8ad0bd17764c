"""Code that several tests share, and everything that a spawned process must be able to import."""
