"""A dump as it lies on the disk: opened, verified, and read row by row."""
