"""The public names, for scripts and for workflows of one's own.

    from megarl.api import GRPOConfig, MegatronPPOActor, RemoteVLLMEngine, load_expr_config

A script is started once a rank, beside its servers, by

    megarl launch SCRIPT.py --config CONFIG.yaml key=value ...

or by torchrun, with MEGARL_SERVER_ADDRS naming servers that run. Names and signatures follow
AReaL's, so that a script of its changes its imports; `examples/` has three. What stands here
stays; modules below may change.

`stats_tracker` is the tracker that all of a process shares: `scalar`, `stat`, `denominator`,
`scope`, `record_timing`, `scope_func_wrapper` and `export`.
"""

from megarl.actor.coordinator import ScriptCoordinator as DistRolloutCoordinator
from megarl.actor.meta import (
    AllocationMode,
    FinetuneSpec,
    RecoverInfo,
    SaveLoadMeta,
    StepInfo,
    WeightUpdateMeta,
    load_expr_config,
)
from megarl.actor.periodic import Evaluator, Saver, StatsLogger
from megarl.actor.policy import PPOActor
from megarl.actor.spmd import MegatronPPOActor, TrainEngine
from megarl.config.run import GRPOConfig, SFTConfig
from megarl.config.schema import GenerationHyperparameters
from megarl.rollout.api import InferenceEngine, ModelRequest, ModelResponse, RolloutWorkflow
from megarl.rollout.engine import RemoteInferenceEngine
from megarl.rollout.executor import WorkflowExecutor
from megarl.rollout.remote import RemoteVLLMEngine
from megarl.rollout.staleness import StalenessManager
from megarl.rollout.workflows.agent import AgentWorkflow
from megarl.rollout.workflows.multi_turn import MultiTurnWorkflow
from megarl.rollout.workflows.reward_fn import RLVRWorkflow
from megarl.rollout.workflows.tools import ToolWorkflow
from megarl.stats import tracker as stats_tracker
from megarl.stats.tracker import StatsTracker
from megarl.trajectory import concat_padded as concat_padded_tensors

__all__ = [
    "AgentWorkflow",
    "AllocationMode",
    "DistRolloutCoordinator",
    "Evaluator",
    "FinetuneSpec",
    "GRPOConfig",
    "GenerationHyperparameters",
    "InferenceEngine",
    "MegatronPPOActor",
    "ModelRequest",
    "ModelResponse",
    "MultiTurnWorkflow",
    "PPOActor",
    "RLVRWorkflow",
    "RecoverInfo",
    "RemoteInferenceEngine",
    "RemoteVLLMEngine",
    "RolloutWorkflow",
    "SFTConfig",
    "SaveLoadMeta",
    "Saver",
    "StalenessManager",
    "StatsLogger",
    "StatsTracker",
    "StepInfo",
    "ToolWorkflow",
    "TrainEngine",
    "WeightUpdateMeta",
    "WorkflowExecutor",
    "concat_padded_tensors",
    "load_expr_config",
    "stats_tracker",
]
