"""Files: the operating system, and reading and writing in threads."""
