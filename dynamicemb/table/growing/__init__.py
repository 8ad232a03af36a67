"""Tables that grow: when, how far, and the move of their index entries."""
