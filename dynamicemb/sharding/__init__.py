"""TorchRec: planner, sharders and the sharded collections. The only folder that imports torchrec.

Gradient scale. A rank computes the loss of its own samples; a row's gradient is the sum of the ranks' gradients divided
by the number of ranks, for dynamic tables as for TorchRec's. (`set_gradient_division(False)` of
``torchrec.distributed.comm_ops`` turns the division off for both.) With losses that are means over equally large
batches this is the gradient of one process whose loss is the mean over the global batch.
"""

from dynamicemb.versions import check_versions

check_versions()
