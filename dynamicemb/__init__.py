"""Dynamic embedding tables for TorchRec."""
