"""Settings of the sandbox in which programs of a model are run."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.config.checks import at_least, one_of, positive

TIERS = ("auto", "bwrap", "landlock", "unsafe")


@dataclass(frozen=True)
class SandboxSettings:
    """How programs are contained, and what one call may use."""

    tier: str = "auto"  # auto: the best there is; unsafe: no containment, only limits
    cpu_s: float = 10.0  # CPU seconds of all processes of a call
    wall_s: float = 20.0  # seconds until a call is ended
    memory_mb: int = 1024  # of each process and of all together; MiB
    output_kb: int = 256  # stdout and stderr together; KiB
    processes: int = 32  # processes and threads at once; landlock has threads only
    scratch_mb: int = 64  # in its folder; MiB

    def __post_init__(self) -> None:
        one_of("tier", self.tier, TIERS)
        for name in ("cpu_s", "wall_s"):
            positive(name, getattr(self, name))
        at_least("memory_mb", self.memory_mb, 64)  # less does not start Python
        for name in ("output_kb", "processes", "scratch_mb"):
            at_least(name, getattr(self, name), 1)
