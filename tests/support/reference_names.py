"""The public names of NVIDIA's package of the same name: those that are here too, and those that are not, with why."""

# Module -> names.
PROVIDED = {
    "dynamicemb": """
        AdmissionStrategy BATCH_SIZE_PER_DUMP BUCKET_ALIGNMENT Counter DEMB_TABLE_ALIGN_SIZE DynamicEmbCheckMode
        DynamicEmbDump DynamicEmbEvictStrategy DynamicEmbInitializerArgs DynamicEmbInitializerMode DynamicEmbLoad
        DynamicEmbPoolingMode DynamicEmbScoreStrategy DynamicEmbTableOptions EmbOptimType FrequencyAdmissionStrategy
        KVCounter MAX_BUCKET_CAPACITY OptimizerArgs ScoreStrategy align_to_table_size data_type_to_dtype
        data_type_to_dyn_emb dyn_emb_to_torch get_sharded_table_capacity get_table_value_bytes string_to_evict_strategy
        torch_to_dyn_emb""",
    "dynamicemb.dynamicemb_config": """
        BATCH_SIZE_PER_DUMP BUCKET_ALIGNMENT DEBUG_EMB_INITIALIZER_MOD DEFAULT_BUCKET_CAPACITY DEFAULT_INDEX_TYPE
        DEMB_TABLE_ALIGN_SIZE DYNAMICEMB_CSTM_SCORE_CHECK DynamicEmbCheckMode DynamicEmbEvictStrategy DynamicEmbKernel
        DynamicEmbPoolingMode DynamicEmbScoreStrategy DynamicEmbTableOptions MAX_BUCKET_CAPACITY SUPPORTED_DIST_TYPES
        ScoreStrategy _sharded_table_bucket_layout align_to_table_size complete_initializer_args data_type_to_dtype
        data_type_to_dyn_emb dtype_to_bytes dyn_emb_to_torch get_constraint_capacity get_eviction_score_strategy
        get_physical_score_order get_sharded_table_capacity get_table_value_bytes normalize_score_strategy
        score_dump_permutation score_load_permutation score_strategy_has_timestamp_column string_to_evict_strategy
        torch_to_dyn_emb validate_score_strategy warning_for_cstm_score""",
    "dynamicemb.types": """
        AdmissionStrategy BUCKET_ALIGNMENT COUNTER_TYPE Cache CopyMode Counter DEMB_TABLE_ALIGN_SIZE
        DynamicEmbInitializerArgs DynamicEmbInitializerMode EMBEDDING_TYPE KEY_TYPE MAX_BUCKET_CAPACITY MemoryType
        OPT_STATE_TYPE OptimizerT OptionsT SCORE_TYPE Storage torch_dtype_to_np_dtype""",
    "dynamicemb.utils": "DTYPE_NUM_BYTES TORCHREC_TYPES torch_to_dyn_emb",
    "dynamicemb.optimizer": """
        EmbOptimType OptimizerArgs get_optimizer_ckpt_state_dim get_optimizer_state_dim get_required_arg
        string_to_opt_type""",
    "dynamicemb.batched_dynamicemb_tables": """
        BatchedDynamicEmbeddingTablesV2 encode_checkpoint_file_path encode_counter_checkpoint_file_path
        encode_meta_json_file_path find_files get_loading_files""",
    "dynamicemb.batched_dynamicemb_compute_kernel": """
        BatchedDynamicEmbedding BatchedDynamicEmbeddingBag DynamicEmbeddingFusedOptimizer""",
    "dynamicemb.embedding_admission": "FrequencyAdmissionStrategy KVCounter",
    "dynamicemb.dump_load": """
        DynamicEmbDump DynamicEmbLoad check_emb_collection_modules find_sharded_modules get_dynamic_emb_module""",
    "dynamicemb.incremental_dump": "get_score incremental_dump is_valid_score_threshold set_score",
    "dynamicemb.get_planner": "get_planner",
    "dynamicemb.planner": """
        DynamicEmbParameterConstraints DynamicEmbParameterSharding DynamicEmbeddingEnumerator
        DynamicEmbeddingShardingPlanner""",
    "dynamicemb.planner.planner": """
        DynamicEmbParameterConstraints DynamicEmbParameterSharding DynamicEmbeddingEnumerator
        DynamicEmbeddingShardingPlanner""",
    "dynamicemb.planner.rw_sharding": """
        GroupedEmbeddingsLookup GroupedPooledEmbeddingsLookup RwPooledDynamicEmbeddingSharding
        RwSequenceDynamicEmbeddingSharding""",
    "dynamicemb.shard": """
        DynamicEmbeddingBagCollectionSharder DynamicEmbeddingCollectionSharder ShardedDynamicEmbeddingBagCollection
        ShardedDynamicEmbeddingCollection""",
    "dynamicemb.shard.embedding": "DynamicEmbeddingCollectionSharder ShardedDynamicEmbeddingCollection",
    "dynamicemb.shard.embeddingbag": "DynamicEmbeddingBagCollectionSharder ShardedDynamicEmbeddingBagCollection",
}

# These can be imported without torchrec and fbgemm_gpu.
WITHOUT_TORCHREC = {
    "dynamicemb",
    "dynamicemb.dynamicemb_config",
    "dynamicemb.types",
    "dynamicemb.utils",
    "dynamicemb.optimizer",
    "dynamicemb.embedding_admission",
    "dynamicemb.dump_load",
    "dynamicemb.incremental_dump",
    "dynamicemb.batched_dynamicemb_tables",
}
# Names whose first use imports one of the two.
LAZY = {"EmbOptimType", "TORCHREC_TYPES"}

_OPTIMIZER_CLASS = (
    "the kernels contain the optimizers; name one with EmbOptimType, and call set_learning_rate of the module"
)
_STATE_WIDTH = "a row has as much optimizer state in memory as in files, so that nothing is cut off or filled up"
_BUFFER = "rows are in chunks of torch's memory, which need no buffer that grows"
_STORAGE = "one index and one store serve every layout; `tables` of the module is the table object"
_STEP = "a forward is one function of the module; nothing of the step between two calls is public"
_SERVING = "tables for serving, and their export, are not in this version"

# Module -> name -> why this package has nothing of the kind. "*" stands for all names of a module.
LEFT_OUT = {
    "dynamicemb.utils": {
        "tabulate": "it formats tables for the terminal; the package does not print",
        "assert_tensors_equal": "a tool of tests; torch.testing.assert_close compares tensors",
    },
    "dynamicemb.optimizer": {
        "truncate_optimizer_states_for_checkpoint": _STATE_WIDTH,
        "pad_optimizer_states_from_checkpoint": _STATE_WIDTH,
        "BaseDynamicEmbeddingOptimizer": _OPTIMIZER_CLASS,
        "SGDDynamicEmbeddingOptimizer": _OPTIMIZER_CLASS,
        "AdamDynamicEmbeddingOptimizer": _OPTIMIZER_CLASS,
        "AdaGradDynamicEmbeddingOptimizer": _OPTIMIZER_CLASS,
        "RowWiseAdaGradDynamicEmbeddingOptimizer": _OPTIMIZER_CLASS,
    },
    "dynamicemb.batched_dynamicemb_tables": {"StorageLayout": _STORAGE},
    "dynamicemb.key_value_table": {"*": _STORAGE},
    "dynamicemb.embedding_admission": {
        "MultiTableKVCounter": "a module makes the counter of its tables from their KVCounter; `stats()` tells of it",
    },
    "dynamicemb.extendable_tensor": {"*": _BUFFER},
    "dynamicemb.construct_twin_module": {
        "ConstructTwinModule": "a tool of tests, which pairs a dynamic model with a static one of TorchRec",
    },
    "dynamicemb.initializer": {
        "*": "the first value of an id follows from seed, table and id inside the kernels; docs/random.md says how",
    },
    "dynamicemb.input_dist": {
        "bucketize_kjt_before_all2all": "ids keep their value, so that there are no blocks to bucketize by",
        "RwSparseFeaturesDist": "the input dist of dynamic tables takes a route of each feature, not block sizes",
    },
    "dynamicemb.batched_dynamicemb_function": {"*": _STEP},
    "dynamicemb.exportable_tables": {"*": _SERVING},
    "dynamicemb.lookup_meta": {"*": _SERVING},
    "dynamicemb.index_range_meta": {"*": _SERVING},
}
