"""What a step leaves behind: its lookup, its gradients, staged rows, and which steps are outstanding."""
