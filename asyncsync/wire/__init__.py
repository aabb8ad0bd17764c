"""The wire: the instructions, the checks of their fields, and how both are encoded. No I/O."""
