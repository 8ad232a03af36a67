"""Steps of the same ids in tables of different sizes."""
