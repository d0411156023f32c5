"""Names and bounds that settings allow and that other files read, too.

Registries above this package map the same names to classes.
"""

BACKENDS = ("megatron", "fsdp")  # training engines
SERVER_BACKENDS = ("vllm", "sglang")  # generation servers
TRANSPORTS = ("process_group", "nixl")
MODES = ("sync", "one_step_off", "fully_async")
TRACKERS = ("tensorboard", "wandb", "mlflow", "swanlab")
TASKS = ("calculator", "code", "countdown", "last_digit", "pictures")
CODECS = ("auto", "renderers", "template")
DTYPES = ("float32", "bfloat16")
QUANTIZATIONS = ("fp8_block",)
FLOAT8_RECIPES = ("off", "blockwise", "mxfp8", "tensorwise")
DISTILLATION_LOSSES = ("off", "sampled_kl", "reverse_kl", "forward_kl")
LAYER_MODULES = ("auto", "te", "torch")
DISPATCHERS = ("alltoall", "allgather", "flex")
EXPERT_MODULES = ("moe", "moe_act", "shared_experts")
RECOMPUTE_MODULES = ("core_attn", "mlp", "layernorm", "mla_up_proj", *EXPERT_MODULES)

MAX_SEED = 2**32 - 1  # numpy's global generator, which vLLM seeds, takes no more
MAX_WEIGHT = 1e6  # of a reward, whose sums are float32
MAX_N = 1000  # responses to a prompt: with more, numbers of subsets overflow float64
MAX_DRAFT = 128  # vLLM's limit (v1/sample/rejection_sampler.py, MAX_SPEC_LEN)
MIN_CURRICULUM_WEIGHT = 1e-6  # a prompt of no weight would never be tried again
