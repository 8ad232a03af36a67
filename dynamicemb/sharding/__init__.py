"""TorchRec integration: planner, sharders, input distribution."""
