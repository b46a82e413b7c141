"""The nodes, one stage a file, in the order of the flow."""

from hp_nodes.nodes.collator import Collator
from hp_nodes.nodes.description import describe
from hp_nodes.nodes.device_prefetcher import DevicePrefetcher
from hp_nodes.nodes.external_step_reader import ExternalStepReader
from hp_nodes.nodes.graph_check import check_graph, peek
from hp_nodes.nodes.host_prefetcher import HostPrefetcher
from hp_nodes.nodes.metadata_deriver import MetadataDeriver
from hp_nodes.nodes.model_parallel_broadcaster import ModelParallelBroadcaster
from hp_nodes.nodes.packer import Packer
from hp_nodes.nodes.planner import Planner
from hp_nodes.nodes.router import Router
from hp_nodes.nodes.sample_reader import SampleReader
from hp_nodes.nodes.splitter import Splitter
from hp_nodes.nodes.stage import Stage
from hp_nodes.nodes.step_checkpointer import StepCheckpointer
from hp_nodes.nodes.window_sampler import WindowSampler

__all__ = [
    "Collator",
    "DevicePrefetcher",
    "ExternalStepReader",
    "HostPrefetcher",
    "MetadataDeriver",
    "ModelParallelBroadcaster",
    "Packer",
    "Planner",
    "Router",
    "SampleReader",
    "Splitter",
    "Stage",
    "StepCheckpointer",
    "WindowSampler",
    "check_graph",
    "describe",
    "peek",
]
