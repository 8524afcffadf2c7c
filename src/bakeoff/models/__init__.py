"""The models, one file each, readable alone."""
