"""Ready-made compositions of the nodes, and programs that run them."""

from graphs.builder import build_distributed_dataloader
from graphs.config import DistributedDatasetConfig

__all__ = ["DistributedDatasetConfig", "build_distributed_dataloader"]
