"""What users hand over, checked before TorchRec takes it on."""
