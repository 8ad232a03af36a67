"""Steps of TorchRec's collections under ``DistributedModelParallel``: dynamic tables beside static ones."""
