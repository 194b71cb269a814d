"""What other trainers call the settings of this one: names of TRL, Unsloth, verl, OpenRLHF and Transformers.

A row is what to write here and the names from elsewhere. What to write is a key, or a sentence with keys in backticks.
A name with dots is the end of a longer one, as `optim.lr` is of verl's `actor_rollout_ref.actor.optim.lr`.
`docs/other-names.md` shows the same rows.
"""

ROWS: dict[str, str] = {
    # model
    "model": """
        model_name_or_path model_name model_id model_path base_model base_model_name pretrained_model pretrain
        pretrained_model_name_or_path hf_model_path policy_model actor_model model.path model.name
        model.model_name_or_path
    """,
    "the model's own tokenizer is used; put other tokenizer files into the model's folder": """
        tokenizer tokenizer_name tokenizer_path tokenizer_name_or_path processing_class use_fast pad_token eos_token
    """,
    "download that revision and set `model` to its folder": "model_revision revision",
    "code that a model brings is never run; use a model that Transformers has": "trust_remote_code external_lib",
    "set `dtype`, `attn_implementation` or `quantization`": "model_init_kwargs model_kwargs override_config",
    "lora.r": "lora_r lora_rank lora_dim max_lora_rank peft_lora_r",
    "lora.alpha": "lora_alpha peft_lora_alpha",
    "lora.target_modules": "lora_target_modules lora_targets lora_target lora_target_linear",
    "lora.adapter": """
        adapter_name_or_path adapter_path lora_adapter lora_adapter_path lora_path lora_checkpoint peft_model_path
    """,
    "set `lora: true` to train an adapter, or `lora: null` to train every weight": """
        use_peft use_lora peft_config lora_config peft full_finetuning finetuning_type lora_enable
    """,
    "there is no dropout, because the scored policy must be the one that sampled; leave it out": """
        lora_dropout dropout attention_dropout disable_dropout neftune_noise_alpha hidden_dropout
    """,
    "a new adapter is plain LoRA on linear layers; leave it out": """
        use_rslora use_dora loftq_config bias lora_bias modules_to_save lora_modules_to_save lora_target_parameters
        lora_task_type task_type init_lora_weights rank_pattern alpha_pattern exclude_modules layers_to_transform
    """,
    "set `quantization: 4bit`, which is NF4 with double quantization": "load_in_4bit use_4bit qlora use_qlora",
    "set `quantization: 8bit`": "load_in_8bit use_8bit",
    "set `quantization: 4bit`, whose details are fixed (NF4, double quantization)": """
        quantization_config bnb_config quantization_bit bnb_4bit_quant_type bnb_4bit_compute_dtype
        bnb_4bit_use_double_quant bnb_4bit_quant_storage use_bnb_nested_quant
    """,
    "dtype": "torch_dtype model_dtype param_dtype compute_dtype precision mixed_precision",
    "set `dtype: bfloat16`": "bf16 use_bf16 bf16_full_eval",
    "set `dtype: float16`": "fp16 use_fp16 fp16_full_eval",
    "products of float32 tensors are in full float32; leave it out": "tf32 allow_tf32",
    "set `device: cpu`": "use_cpu no_cuda",
    "set `device: cuda` or `device: cpu`": "device_map",
    "set `attn_implementation: flash_attention_2`": "use_flash_attention_2 use_flash_attn flash_attn",
    "attn_implementation": "attention_implementation attn_impl",
    "liger_layers": "use_liger_kernel use_liger liger_kernel liger_kernel_config",
    "the loss never forms the logits, whatever the settings; leave it out": """
        use_liger_loss use_fused_kernels cast_lm_head_to_fp32 use_logits_to_keep entropy_from_logits_with_chunking
    """,
    "models are not compiled; leave it out": "torch_compile use_torch_compile compile torch_compile_backend",
    "chat_template": "custom_chat_template chat_template_path",
    "write the values into `chat_template`": "chat_template_kwargs apply_chat_template_kwargs enable_thinking",
    "system_prompt": "system_message system_instruction system",
    # data
    "task.path": """
        dataset dataset_name dataset_path dataset_id data_path data_files train_dataset train_files train_file
        train_data prompt_data datasets
    """,
    "task.subset": "dataset_config dataset_config_name config_name subset_name",
    "task.split": "dataset_train_split dataset_split train_split",
    "task.held_out_split": "dataset_test_split eval_split test_split val_split",
    "task.held_out_path": """
        val_files val_file eval_files eval_file eval_data eval_dataset validation_file test_files test_file
    """,
    "task.held_out": """
        test_split_size test_size eval_size val_size val_set_size eval_ratio val_ratio validation_split_percentage
    """,
    'set `task.prompt` to a template such as "{question}", or `task.messages` to a column of chat messages': """
        prompt_key prompt_column prompt_template input_key input_template question_column dataset_text_field
        text_field apply_chat_template
    """,
    "task.answer": "answer_key answer_column label_key label_column solution_column ground_truth_key target_column",
    "examples are shuffled in each epoch, by `seed`; leave it out": "shuffle shuffle_dataset train_sampling_strategy",
    "a run takes `prompts_per_step` prompts in each of `max_steps` steps; for fewer rows, shorten the file": """
        max_samples max_train_samples num_train_samples train_max_samples dataset_size
    """,
    "the rows are read once, by the main process; leave it out": """
        dataset_num_proc num_workers dataset_streaming streaming dataloader_num_workers dataloader_pin_memory
        dataloader_drop_last dataloader_prefetch_factor dataloader_persistent_workers dataloader_in_order
        dataloader_multiprocessing_context preprocessing_num_workers
    """,
    "a reward gets every column of the rows; leave it out": "remove_unused_columns label_names return_raw_chat",
    # lengths
    "max_prompt_length": """
        rollout_max_prompt_len prompt_length prompt_max_len max_prompt_len max_input_length prompt_max_length
    """,
    "max_completion_length": """
        max_new_tokens max_tokens max_generated_tokens rollout_max_response_len max_response_length response_length
        generate_max_len max_completion_tokens max_output_tokens max_gen_len max_generation_length completion_length
        max_new_token
    """,
    "prompt and completion have their own bounds: set `max_prompt_length` and `max_completion_length`": """
        max_seq_length max_length max_len sequence_len max_model_len max_model_length vllm_max_model_length
        cutoff_len seq_length sequence_length context_length
    """,
    "prompts are never shortened: `overlong_prompts: drop` leaves long ones out, and `refuse` ends the run": """
        truncation truncation_mode truncation_side filter_overlong_prompts truncate_prompts
    """,
    # rewards
    "rewards": "reward_funcs reward_functions reward_function reward_fn reward_fns reward_manager reward_fn_key",
    "set `rewards.weight`, the weight of each entry, as in {name: correctness, weight: 2.0}": "reward_weights",
    'set `rewards` to [{function: "file.py:NAME"}]': """
        custom_reward_function custom_reward_function.path custom_reward_function.name agent_func_path compute_score
        reward_func_path
    """,
    "there are no reward models; name a function of a file that calls yours in `rewards`": """
        reward_model reward_model_name_or_path reward_model_path reward_pretrain remote_rm_url rm_path
        reward_processing_classes
    """,
    "combine_rewards": "multi_objective_aggregation",
    "rewards are not clipped; bound them in a function of `rewards`": "reward_clip_range clip_reward_range",
    "scale_rewards": """
        normalize_advantages norm_adv whiten_advantages adv_norm advantage_normalization normalize_reward
        whiten_rewards
    """,
    "set `scale_rewards: group`, or `scale_rewards: none`": "norm_adv_by_std_in_grpo",
    # rollouts
    "a step has `prompts_per_step` prompts with `num_generations` completions each": """
        per_device_train_batch_size train_batch_size per_device_batch_size rollout_batch_size batch_size
        global_batch_size mini_batch_size generation_batch_size steps_per_generation ppo_mini_batch_size
        num_mini_batches effective_batch_size num_prompts_per_step num_prompts num_unique_prompts_rollout
    """,
    "a step of any size is computed in micro-batches of `micro_batch_tokens` tokens; leave it out": """
        gradient_accumulation_steps gradient_accumulation grad_accum grad_accum_steps auto_find_batch_size
    """,
    "micro-batches are measured in tokens: set `micro_batch_tokens`": """
        ppo_micro_batch_size ppo_micro_batch_size_per_gpu micro_batch_size micro_train_batch_size
        micro_rollout_batch_size forward_batch_size log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu
        use_dynamic_bsz log_prob_use_dynamic_bsz unsloth_num_chunks
    """,
    "micro_batch_tokens": """
        ppo_max_token_len_per_gpu log_prob_max_token_len_per_gpu max_token_len_per_gpu max_tokens_per_gpu
        max_tokens_per_mb
    """,
    "num_generations": """
        rollout.n n n_samples n_samples_per_prompt num_samples num_samples_per_prompt samples_per_prompt
        num_return_sequences group_size rollout_n num_rollouts rollouts_per_example num_completions grpo_samples
        num_samples_per_prompt_rollout
    """,
    "temperature": "sampling_temperature rollout_temperature",
    "an evaluation samples with `temperature`; leave it out": "val_kwargs.temperature eval_temperature",
    "completions are drawn from the unfiltered distribution, which is the one that is trained; leave it out": """
        min_p repetition_penalty presence_penalty frequency_penalty do_sample num_beams val_kwargs.do_sample
        typical_p val_kwargs.top_p val_kwargs.top_k
    """,
    "set `temperature` and `max_completion_length`": """
        generation_kwargs generation_config sampling_params vllm_sampling_params gen_kwargs cache_implementation
    """,
    "a completion ends with the model's end-of-sequence tokens; leave it out": """
        stop stop_strings stop_sequences stop_token_ids ignore_eos min_new_tokens
    """,
    'start a vLLM server and set `sampler` to {name: server, url: "http://HOST:PORT"}': """
        use_vllm vllm vllm_mode fast_inference rollout.name rollout_backend inference_engine use_sglang vllm_server
        vllm_config
    """,
    "sampler.url": "vllm_server_base_url vllm_server_host vllm_server_port server_url base_url api_base",
    "sampler.wait_seconds": "vllm_server_timeout server_timeout",
    "an option of the vLLM server, which you start yourself: pass it there": """
        gpu_memory_utilization vllm_gpu_memory_utilization tensor_parallel_size tensor_model_parallel_size
        vllm_tensor_parallel_size vllm_num_engines vllm_model_impl vllm_enable_sleep_mode vllm_group_port
        vllm_structured_outputs_regex vllm_guided_decoding_regex enforce_eager enable_chunked_prefill
        enable_prefix_caching max_num_seqs max_num_batched_tokens free_cache_engine
    """,
    "set `sampler: paged`": """
        use_transformers_paged use_transformers_continuous_batching transformers_continuous_batching_config
    """,
    "set `correction: true`, or a mapping with `correction.level` and `correction.mode`": """
        vllm_importance_sampling_correction vllm_importance_sampling_mode rollout_correction rollout_is use_tis tis
        enable_vllm_is_correction off_policy_mask_threshold
    """,
    "correction.max": """
        vllm_importance_sampling_cap vllm_importance_sampling_clip_max rollout_is_threshold tis_imp_ratio_cap
        imp_ratio_cap
    """,
    "correction.min": "vllm_importance_sampling_clip_min rollout_is_threshold_lower",
    "set `dynamic_sampling: true`": "filter_groups filter_groups.enable dynamic_filtering filter_zero_std",
    "dynamic_sampling.max_rounds": "max_num_gen_batches filter_groups.max_num_gen_batches",
    "dynamic_sampling.by": "filter_groups.metric",
    "a completion is one turn without tools; leave it out": """
        max_tool_calling_iterations tools multi_turn max_turns tool_config_path environment_factory
    """,
    # objective
    "loss_type": "loss_mode policy_loss.loss_mode algorithm algo policy_loss_type",
    "set `loss_type`, `baseline` and `scale_rewards`: GRPO is their default, and RLOO is `baseline: leave_one_out`": """
        adv_estimator advantage_estimator
    """,
    "averages belong to `loss_type`: dapo takes the mean over tokens, grpo over completions": "loss_agg_mode",
    "set `loss_type: gspo` for ratios of whole completions": "importance_sampling_level",
    "epsilon": """
        clip_ratio clip_range cliprange clip_eps clip_epsilon clip_ratio_low cliprange_low eps_clip eps_clip_low
        epsilon_low ppo_clip
    """,
    "epsilon_high": "clip_ratio_high cliprange_high clip_range_high eps_clip_high clip_higher",
    "ratios have no third bound in a run; leave it out": "delta clip_ratio_c dual_clip",
    "the parts of a loss other than `epsilon`, `epsilon_high`, `beta` and `entropy_coef` are fixed by `loss_type`": """
        sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_k_neg vespo_lambda_pos vespo_lambda_neg
        use_bias_correction_kl top_entropy_quantile
    """,
    "beta": """
        kl_coef kl_coeff kl_loss_coef kl_penalty_coef kl_weight kl_beta beta_kl init_kl_coef kl_ctl kl_lambda
        kl_ctrl.kl_coef reference_kl_coef
    """,
    "the KL divergence is in the loss if `beta` is above 0": "use_kl_loss use_kl_in_reward use_kl",
    "the KL estimate is k3 with the fixed weight `beta`; leave it out": """
        kl_loss_type kl_estimator kl_penalty kl_ctrl kl_ctrl.type kl_target target_kl horizon kl_horizon
        adap_kl_ctrl
    """,
    "the reference policy is the model at the start of the run and stays as it is; leave it out": """
        ref_model reference_model ref_model_name_or_path sync_ref_model ref_model_mixup_alpha ref_model_sync_steps
        ref_policy
    """,
    "ref_free": "reference_free",
    "entropy_coef": "entropy_coeff entropy_loss_coef ent_coef entropy_bonus entropy_weight entropy_beta",
    "the weight of the entropy is fixed: set `entropy_coef`": """
        use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target
    """,
    "num_iterations": "ppo_epochs num_ppo_epochs ppo_num_epochs mu ppo_iterations updates_per_rollout",
    "mask_truncated_completions": """
        mask_truncated overlong_filtering overlong_filter filter_truncated_completions mask_overlong
    """,
    "set `rewards` to a list with linear_length or cosine_length beside the others": """
        overlong_buffer overlong_buffer.enable overlong_buffer.len overlong_buffer_len overlong_penalty_factor
        soft_overlong_punishment length_penalty
    """,
    "there is no value model: advantages are those of a group; leave it out": """
        critic gamma lam gae_lambda vf_coef value_coef vf_loss_coef cliprange_value critic_learning_rate critic_lr
        critic_pretrain critic_warmup
    """,
    "lambda_reg": "lambda_pref pref_coef preference_coef reg_lambda lambda_dpo",
    "beta_dpo": "dpo_beta pref_beta preference_beta",
    "reward_margin": "margin pair_margin min_reward_gap",
    # optimizer
    "optimizer": "optim optimizer_name optimizer_type optim_type",
    "AdamW's other constants are torch's; leave it out": "adam_epsilon adam_eps optim_args optim_target_modules",
    "learning_rate": "lr actor_learning_rate actor_lr policy_lr learning_rate_actor optim.lr base_lr peak_lr",
    "lr_scheduler": """
        lr_scheduler_type scheduler scheduler_type lr_scheduler_name lr_schedule warmup_style lr_decay_style
    """,
    "`lr_scheduler` linear and cosine decay to 0 at `max_steps`; leave it out": """
        lr_scheduler_kwargs min_lr min_lr_ratio num_cycles lr_decay_steps
    """,
    "warmup_steps": "lr_warmup_steps num_warmup_steps warmup_iters lr_warmup",
    "set `warmup_steps` to that share of `max_steps`": "warmup_ratio lr_warmup_steps_ratio lr_warmup_ratio",
    "adam_beta1": "beta1 adam_b1",
    "adam_beta2": "beta2 adam_b2",
    "set `adam_beta1` and `adam_beta2`": "betas adam_betas",
    "max_grad_norm": "grad_clip clip_grad clip_grad_norm grad_clip_norm gradient_clipping gradient_clip_val max_norm",
    "weight_decay": "wd l2",
    # run
    "max_steps": """
        total_training_steps num_steps total_steps max_train_steps num_train_steps num_training_steps train_steps
        training_steps
    """,
    "the length of a run is `max_steps`; one epoch is the number of examples divided by `prompts_per_step`": """
        num_train_epochs num_epochs epochs total_epochs max_epochs total_train_epochs n_epochs num_episodes
        total_episodes
    """,
    "save_steps": "save_freq save_interval save_every checkpoint_interval checkpointing_steps checkpoint_every",
    "a checkpoint is saved every `save_steps` steps and after the last one; leave it out": """
        save_strategy save_only_model save_model save_hf_ckpt save_safetensors save_on_each_node
        enable_jit_checkpoint
    """,
    "save_total_limit": "max_actor_ckpt_to_keep max_ckpt_num keep_last_n_checkpoints keep_last_n max_checkpoints",
    "with `save_total_limit`, the checkpoint of the best evaluation is kept too": """
        load_best_model_at_end metric_for_best_model greater_is_better best_model_metric
    """,
    "eval_steps": "test_freq eval_freq eval_interval eval_every evaluation_steps",
    "set `eval_prompts` to the number of held-out prompts, and `eval_steps` to evaluate during training too": """
        eval_strategy evaluation_strategy do_eval eval_on_start val_before_train do_train do_predict eval_delay
    """,
    "`eval_prompts` is the number of held-out prompts in an evaluation": """
        per_device_eval_batch_size eval_batch_size val_batch_size eval_num_examples max_eval_samples
        eval_accumulation_steps
    """,
    "eval_samples": "num_generations_eval eval_n eval_n_samples_per_prompt val_kwargs.n eval_rollouts_per_example",
    "set `max_steps: 0` to evaluate and not train": "val_only eval_only",
    "output_dir": """
        save_path save_dir ckpt_path checkpoint_dir default_local_dir output_path out_dir output logging_dir log_dir
    """,
    "a run has the name of its folder: set `output_dir`": """
        run_name project project_name experiment_name wandb_project wandb_run_name trial_name
    """,
    "every step is written to metrics.jsonl and TensorBoard, and every completion to completions/; leave it out": """
        report_to logger logging wandb use_wandb use_tensorboard log_with logging_steps logging_strategy
        logging_first_step logging_nan_inf_filter log_level log_level_replica log_on_each_node log_completions
        num_completions_to_print log_unique_prompts log_completions_hub_repo log_multimodal log_val_generations
        rollout_data_dir validation_data_dir disable_tqdm trackio_space_id
    """,
    "add --resume to the command": """
        resume_from_checkpoint resume resume_mode resume_from_path load_checkpoint ignore_data_skip
        restore_callback_states_from_checkpoint
    """,
    "a run is not uploaded; upload the folder of its adapter or model": """
        push_to_hub hub_model_id hub_token hub_strategy hub_private_repo hub_revision hub_always_push
        trackio_bucket_id trackio_static_space_id
    """,
    "seed": "random_state random_seed data_seed rng_seed",
    "threads": "num_threads omp_num_threads",
    "gradient_checkpointing": """
        use_gradient_checkpointing enable_gradient_checkpointing activation_checkpointing recompute
        gradient_checkpointing_kwargs activation_checkpointing_kwargs
    """,
    "offload_activations": "activation_offloading enable_activation_offload",
    "only activations are offloaded: set `offload_activations`": """
        param_offload optimizer_offload adam_offload cpu_offload offload_policy
    """,
    "start one process per GPU with --processes (docs/hardware.md); leave it out": """
        n_gpus gpus devices n_gpus_per_node nnodes num_nodes num_gpus num_processes world_size local_rank strategy
        fsdp fsdp_config deepspeed deepspeed_config ds_config zero_stage ds3_gather_for_generation
        accelerator_config parallelism_config ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb
        ddp_find_unused_parameters ddp_static_graph ddp_timeout ulysses_sequence_parallel_size context_parallel_size
        ray_kwargs ray_init
    """,
    "padding is left out wherever the model's attention allows it; leave it out": """
        packing packing_samples padding_free use_remove_padding remove_padding pad_to_multiple_of group_by_length
    """,
    "it has no counterpart here; leave it out": """
        average_tokens_across_devices batch_eval_metrics debug eval_do_concat_batches eval_use_gather_object
        full_determinism include_for_metrics include_num_input_tokens_seen label_smoothing_factor length_column_name
        prediction_loss_only router_aux_loss_coef skip_memory_metrics torch_compile_mode torch_empty_cache_steps
        use_cache profiler global_profiler
    """,
}

OTHER_NAMES: dict[str, str] = {name: here for here, names in ROWS.items() for name in names.split()}
"""From a name elsewhere to what to write here."""

OTHER_VALUES: dict[str, dict[str, str]] = {
    "dtype": {
        "bf16": "bfloat16",
        "fp16": "float16",
        "half": "float16",
        "fp32": "float32",
        "float": "float32",
        "torch.bfloat16": "bfloat16",
        "torch.float16": "float16",
        "torch.float32": "float32",
    },
    "quantization": {"nf4": "4bit", "int4": "4bit", "bnb-4bit": "4bit", "int8": "8bit", "none": "null"},
    "attn_implementation": {"flash_attention": "flash_attention_2", "flash_attn": "flash_attention_2"},
    "optimizer": {
        "adam": "adamw",
        "adamw_torch": "adamw",
        "adamw_torch_fused": "adamw",
        "adamw_hf": "adamw",
        "adamw_bnb_8bit": "adamw_8bit",
        "paged_adamw_8bit": "adamw_8bit",
    },
    "lr_scheduler": {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"},
    "loss_type": {"rloo": "reinforce with `baseline: leave_one_out`", "dr-grpo": "dr_grpo", "ppo": "grpo"},
    "sampler": {
        "hf": "generate",
        "transformers": "generate",
        "vllm": '{name: server, url: "http://HOST:PORT"} with a vLLM server that you start',
    },
    "device": {"gpu": "cuda", "cuda:0": "cuda"},
}
"""By key, from a value elsewhere to the value here."""


def other_value(key: str, value: object) -> str:
    """What to write instead of a value from elsewhere, as the end of a message; empty if it is not known."""
    value_here = OTHER_VALUES.get(key, {}).get(str(value).lower())
    return f"; type {key}: {value_here}" if value_here else ""
