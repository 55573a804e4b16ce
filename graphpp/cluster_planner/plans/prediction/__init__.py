"""The seconds and bytes of one setting."""
