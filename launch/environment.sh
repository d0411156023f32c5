# shellcheck shell=bash
# What processes on the nodes have of the launch script's: variables, and a container.
# shellcheck disable=SC2154,SC2034 # slurm_lib.sh sets and uses them

NETWORKS='^(NCCL|UCX|UCC|GLOO|FI|OMPI|MCORE_RL)_'

not_secret() { grep -vE '(TOKEN|KEY|SECRET|PASSWORD)$'; } # argv can be read by everybody

# Names of variables that ssh passes on. What else is exported here may be of this host alone.
passed_on() {
    compgen -e | grep -E "$NETWORKS|^(RAY|HF|VLLM|FLASHINFER|OMP|CUDA|NVIDIA|NVTE|NVSHMEM|TRITON|WANDB|MKL|KMP)_|\
^(PYTHON|TORCH|PYTORCH|TRANSFORMERS|TOKENIZERS)|^(LD_LIBRARY_PATH|LD_PRELOAD|(https?|no)_proxy)$" | not_secret
}

# Those whose values in the image do not count.
over_image() { compgen -e | grep -E "$NETWORKS|^RAY_|^PYTHON(PATH|UNBUFFERED)$" | not_secret; }

find_image() { # containers: options of srun's, or a command before the command
    container=() in_image=() keeps_variables=''
    [ -n "${MCORE_RL_IMAGE:-}" ] || return 0
    # Each step of srun's is a container of its own: Ray's sockets are seen from others in /tmp alone.
    local folder name pairs='' mounts=$root,${output%/*},/tmp options=''
    if [ -d "${TMPDIR:-}" ] && [ "$TMPDIR" != /tmp ]; then mounts+=,$TMPDIR; fi
    mounts+=${MCORE_RL_MOUNTS:+,$MCORE_RL_MOUNTS}
    for folder in ${mounts//,/ }; do pairs+=,$folder:$folder; done
    if [ -n "$by_srun" ]; then options=$(srun --help 2>/dev/null) || true; fi
    if [[ $options = *--container-image* ]]; then
        container=(--container-image="$MCORE_RL_IMAGE" --container-mounts="${pairs#,}")
        if [[ $options = *--container-env* ]]; then keeps_variables=1; fi
    elif command -v apptainer >/dev/null; then
        in_image=(env)
        for name in $(over_image); do in_image+=("APPTAINERENV_$name=${!name}"); done
        in_image+=(apptainer exec --nv --bind "${pairs#,}" "$MCORE_RL_IMAGE")
    elif [ -n "$by_srun" ] && [ -n "$dry_run" ]; then
        echo 'neither pyxis nor apptainer is on this machine; on nodes with pyxis it would be:'
        container=(--container-image="$MCORE_RL_IMAGE" --container-mounts="${pairs#,}")
        keeps_variables=1
    else
        die "MCORE_RL_IMAGE is '$MCORE_RL_IMAGE', and there is neither pyxis in srun nor apptainer"
    fi
}
