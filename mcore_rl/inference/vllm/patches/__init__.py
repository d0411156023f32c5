"""Patches of vLLM 0.32: what happens without each, and what vLLM has to do until it can go.

Docstrings have upstream's lines. All are called once a process, by inference/vllm/worker.py, where
nothing else is said.

cpu.use_compiled_ops: norms are plain torch, rotations of MLA are wrong. Registers both for CPUs.
cpu.map_expert_ids: expert parallelism ends in a native crash. Reads `expert_map` on CPUs.
cpu.route_without_groups: MiniMax-M2 is routed by a softmax. Takes sigmoid scores on CPUs.
cpu.repeat_sampling_parameters: drafts are sampled by uninitialised memory (drafts.py). Mends its
    operator, which a unit test watches.
cpu.exchange_tokens: data-parallel ranks have no collectives. Has them on CPUs.
cpu.gather_single_tokens: DeepSeek-V3 loses a single token on tp ranks. Marks partial states.
cpu.hide_llvmlite: workers of Kimi K2.5 do not start. Reads the attributes of Triton's kernels only.
cpu.record_experts: router replay gets no experts. Calls its connector on CPUs.
caches.patch_caches: preempted requests with images end the engine, which also keeps prefixes of old
    weights beside paused requests. Keeps pixels, and resets prefixes then.
caches.fit_caches: a size is taken though the GPU has less. Bounds that of a default.
sleep.patch_sleep: CPUs do not sleep, and a NaN in old memory survives a wake. Sleeps on CPUs, and
    zeroes the cache.
processes.end_calls_of_dead_engines: calls wait for ever. Fails them with the engine.
processes.return_all_answers: errors of further data-parallel ranks are lost. Returns all answers.
processes.bind_stores: stores listen on all addresses. Listens on the one that it is given.
processes.set_up_coordinator: the coordinator outlives a killed server. Ends with its parent.
processes.name_shared_memory: segments of two jobs collide. Takes a name.

For features of this package, not for faults, others stand where the feature is: adapters.py (from
memory), processes.py (where workers meet), worker.py (how processes are forked).
"""
