"""The five tasks, one file each."""
