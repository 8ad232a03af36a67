"""The way of a batch between ranks, and of its gradients back."""
