"""The commands of the command line: a file for each, or for two that belong together."""
