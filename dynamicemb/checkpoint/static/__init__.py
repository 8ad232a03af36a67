"""Import of static tables: a checkpoint of TorchRec fills dynamic tables."""
