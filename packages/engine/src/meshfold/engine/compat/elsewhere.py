"""Names of Colossal-AI that are not here, and what to write for each: data for error messages, and for the page."""

from __future__ import annotations

from collections.abc import Mapping

ELSEWHERE: Mapping[str, str] = {
    "build_pipeline_model": "give the whole model: parallel=dict(pipeline=2) cuts it",
    "CAME": "any optimizer that steps elementwise, or torch.optim.Adafactor with zero=dict(stage=1)",
    "ChunkManager": "zero=dict(stage=3)",
    "clip_grad_norm_fp32": "clip_grad_norm=1.0 of the config or of Engine",
    "ColoTensor": "a layout of meshfold.mesh, as in Layout.parse('m:row k:col')",
    "DataParallelSampler": "get_dataloader(dataset, batch_size=...)",
    "DeviceMesh": "Mesh(dict(data=2, tensor=4)) of meshfold.mesh",
    "FusedAdam": "optimizer=dict(name='adamw', lr=...), or HybridAdam",
    "GeminiDDP": "zero=dict(stage=3)",
    "get_dist_logger": "logging.getLogger(__name__), on the ranks where engine.mesh.rank == 0",
    "InterleavedPipelineSchedule": "pipeline=dict(size=2, schedule='interleaved', chunks=2)",
    "MoeHybridParallelPlugin": "nothing: there is no expert parallelism; HybridParallelPlugin shards the experts' matrices",
    "PipelinableContext": "give the whole model: parallel=dict(pipeline=2) cuts it",
    "PipelineSchedule": "pipeline=dict(size=2, microbatches=8)",
    "Policy": "rules={'*.mix': 'column'} of Engine, where names and shapes do not tell",
    "ProcessGroupMesh": "Mesh(dict(data=2, tensor=4)) of meshfold.mesh",
    "seed": "nothing: dropout follows the elements of the global batch, on every rank",
    "set_seed": "seed=0 in the config, or Engine(..., seed=0)",
    "ShardConfig": "parallel=dict(tensor=4)",
    "ShardedModelV2": "zero=dict(stage=3)",
    "ShardedOptimizerV2": "zero=dict(stage=3)",
    "ShardFormer": "parallelize(model, mesh, '1d') of meshfold.tensor_parallel",
    "split_batch_2d": "engine.shard_batch(global_batch)",
    "Trainer": "a loop over engine.train_step(batch); or Lightning's Trainer",
    "ZeroDDP": "zero=dict(stage=3)",
    "ZeroOptimizer": "zero=dict(stage=3)",
}
