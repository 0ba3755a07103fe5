"""The ways of finding bad outputs, one file each."""
