"""Settings of Weft by names that it does not have, for the errors of unknown keys and options."""

RENAMED = {
    "train.global_batch": "train.global_batch_size",
    "train.micro_batch": "train.micro_batch_size",
    "guard.patience_seconds": "guard.hang_timeout_seconds",
    "guard.rejoin_seconds": "guard.node_rejoin_seconds",
    "guard.replicas_every": "guard.sdc_check_interval",
    "plan.precision.forward": "plan.precision.param_dtype",
    "plan.precision.reduce": "plan.precision.reduce_dtype",
    "plan.precision.states": "plan.precision.optimizer_state_dtype",
    "plan.precision.float32": "plan.precision.fp32_modules",
    "plan.memory.recompute_every": "plan.memory.recompute_interval",
    "plan.memory.offload_ahead": "plan.memory.offload_prefetch",
    "plan.memory.optimizer": "plan.memory.optimizer_device",
    "plan.memory.folder": "plan.memory.offload_dir",
    "plan.comm.compress_level": "plan.comm.compress_scope",
    "plan.comm.head_groups": "plan.comm.ulysses_chunks",
    "--ranks": "--nproc-per-node",
    "--ranks-a": "--nproc-per-node-a",
    "--ranks-b": "--nproc-per-node-b",
    "--hosts": "--nnodes",
    "--host": "--node-rank",
    "--meet": "--rdzv-endpoint",
    "--world": "--world-size",
}
"""Current name of each key and command-line option that version 0.1 named differently."""
OTHER_NAMES = {
    name: answer
    for answer, names in {
        "out": "output_dir",
        "model.path (a folder) or model.config": "model.name model_name model_name_or_path "
        "pretrained_model_name_or_path",
        "model.init_seed (initial weights) or train.seed": "data_seed",
        "data.path": "train_file dataset dataset_name",
        "data.seq_len": "max_length max_seq_length max_seq_len seq_length packed_sequence_size block_size "
        "context_length",
        'data.format = "chat"': "assistant_only_loss",
        'task.fields = {text = "body"}; for task.kind = "causal", rename the field to "text"': "text_column text_field",
        "task.classes": "num_labels num_classes",
        "task.max_new_tokens": "max_new_tokens generation_max_length",
        "train.steps": "max_steps train_iters max_iters num_steps total_steps",
        "train.steps (epochs x rows / train.global_batch_size)": "epochs num_epochs num_train_epochs max_epochs",
        "train.global_batch_size (rows of a step, over all ranks) or train.micro_batch_size (rows of a "
        "forward)": "batch_size",
        "train.global_batch_size": "train_batch_size",
        "train.global_batch_size (rows of a device x accumulation steps x data ranks)": "gradient_accumulation_steps "
        "accumulate_grad_batches grad_accum gradient_accumulation",
        "train.micro_batch_size": "per_device_train_batch_size per_device_batch_size local_batch_size "
        "train_micro_batch_size_per_gpu pipeline_parallel_microbatch_size pp_microbatch_size",
        "train.evaluate_every": "eval_steps eval_interval eval_every",
        "checkpoint.every": "save_steps save_interval save_every checkpoint.interval",
        "checkpoint.keep": "save_total_limit keep_latest_k",
        "--resume": "resume_from_checkpoint load load_checkpoint",
        "optimizer.name": "optim optimizer.type",
        "optimizer.lr": "learning_rate max_lr base_lr",
        "optimizer.betas": "adam_beta1 adam_beta2 beta1 beta2",
        "optimizer.eps": "adam_epsilon epsilon",
        "optimizer.clip_norm": "max_grad_norm max_norm clip_grad grad_clip gradient_clipping clip_grad_norm",
        "optimizer.schedule": "lr_scheduler_type lr_scheduler lr_decay_style scheduler",
        'optimizer.schedule = "wsd"': "decay_ratio",
        "optimizer.warmup_steps": "lr_scheduler.warmup_steps lr_warmup_iters warmup_ratio warmup warmup_iters "
        "num_warmup_steps",
        "optimizer.freeze_steps": "freeze_step",
        'plan.precision.param_dtype = "bf16"': "bf16 bfloat16 mixed_precision_param",
        'plan.precision.param_dtype = "bf16" or "fp16"': "mixed_precision amp dtype mp_policy.param_dtype",
        "plan.precision.update (stored weights) or plan.precision.param_dtype (forward)": "torch_dtype",
        'plan.precision.param_dtype = "fp16" and plan.precision.loss_scale = "dynamic"': "fp16 float16",
        "plan.precision.reduce_dtype": "mixed_precision_reduce mp_policy.reduce_dtype communication_data_type "
        "grad_accum_dtype "
        "accumulate_allreduce_grads_in_fp32",
        'plan.memory.recompute = ["block"]': "gradient_checkpointing activation_checkpointing activation_checkpoint "
        "fsdp_activation_checkpointing recompute_granularity recompute_modules selective_ac_option",
        'plan.memory.offload = ["block"]': "cpu_checkpointing cpu_offloading_num_layers",
        'plan.memory.optimizer_device = "host"': "fsdp_offload_params enable_cpu_offload optimizer_cpu_offload "
        "offload_policy "
        "offload_optimizer cpu_offload",
        "plan.memory.optimizer_bytes": "optimizer_offload_fraction offload_optimizer.ratio",
        "plan.memory.offload_dir": "nvme_path",
        "plan.parallel.zero": "zero_optimization.stage zero_stage",
        "plan.parallel.zero = 0": "ddp",
        "plan.parallel.zero = 1": "use_distributed_optimizer",
        "plan.parallel.zero = 3, or 2 without resharding after forward": "fsdp fsdp2 fsdp_config "
        "fsdp_reshard_after_forward "
        "reshard_after_forward distributed.strategy data_parallel_sharding_strategy full_shard",
        "plan.parallel.dp_shard": "parallelism_config_dp_shard_size data_parallel_shard_degree mics_shard_size "
        "dp dp_size",
        "plan.parallel.dp_replicate": "parallelism_config_dp_replicate_size data_parallel_replicate_degree "
        "dp_replicate_size "
        "num_distributed_optimizer_instances",
        "plan.parallel.tp": "parallelism_config_tp_size tensor_parallel_degree tensor_model_parallel_size "
        "tensor_parallel "
        "tensor_parallel_size autotp_size tp_size",
        "plan.parallel.sp": "enable_sequence_parallel sequence_parallel",
        "plan.parallel.cp": "parallelism_config_cp_size context_parallel_degree context_parallel_size cp_size",
        "plan.parallel.cp and plan.parallel.cp_ulysses": "parallelism_config_sp_size sequence_parallel_size "
        "cp_comm_type",
        "plan.parallel.ep": "expert_parallel_degree expert_model_parallel_size expert_parallel_size ep_size",
        "plan.parallel.etp": "expert_tensor_parallel_size",
        "plan.parallel.pp": "pipeline_parallel_degree pipeline_model_parallel_size pipeline_parallel_size pp_size",
        "plan.pipeline.schedule": "pipeline_parallel_schedule pipeline_parallel_schedule_csv pp_schedule",
        "plan.pipeline.virtual_stages": "num_virtual_stages_per_pipeline_rank",
        "plan.pipeline.stage_blocks": "module_fqns_per_model_part pipeline_model_parallel_layout",
        "plan.comm.prefetch": "fsdp_forward_prefetch stage3_prefetch_bucket_size",
        'plan.comm.overlap_chunks = "auto"': "enable_async_tensor_parallel tp_comm_overlap",
        'plan.comm.compression = "int8"': "zero_quantized_gradients",
        "adapter.r": "lora_r lora_rank",
        "adapter.alpha": "lora_alpha",
        "adapter.targets": "target_modules lora_target_modules",
        "--nproc-per-node": "num_processes nproc_per_node nproc nprocs num_gpus gpus",
        "--nnodes": "num_machines num_nodes nnodes",
        "--node-rank": "machine_rank node_rank",
        "--rdzv-endpoint": "main_process_ip main_process_port master_addr master_port",
    }.items()
    for name in names.split()
}
"""Setting of Weft for the names of other frameworks (docs/coming-from.md) and for common guesses."""
