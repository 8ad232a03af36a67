"""TorchRec: planner, sharders and the sharded collections. The only folder that imports torchrec."""

from dynamicemb.sharding.versions import check_versions

check_versions()
