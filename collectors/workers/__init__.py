"""Worker processes: what they run, what travels between them and their trainer."""
