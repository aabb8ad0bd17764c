"""The wire: the messages, the checks of their fields, and their encoding. No I/O."""
