"""What tests share: models, disks, pools of ranks, the oracle."""
