"""Context parallelism: attention of sequences that are sharded over the ranks of a torch.distributed group.

out = fp8attn.distributed.context_parallel_sdpa(q, k, v, group=group)  # each rank has a shard of the sequence
"""

from .agreement import Disagreement
from .context_parallel import context_parallel_sdpa
from .sharding import shard, shard_lengths, unshard

__all__ = ["Disagreement", "context_parallel_sdpa", "shard", "shard_lengths", "unshard"]
