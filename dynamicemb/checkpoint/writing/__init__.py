"""What a dump writes: contents, files, increments, in the background or at once."""
