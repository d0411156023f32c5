"""The shell commands of README.md, CONTRIBUTING.md and docs/*.md, and which test runs them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# Kinds of commands, and the file of the tests that runs all commands of the kind. A command of no
# kind says on its page what it needs that machines of tests lack: `COMMAND   # needs GPUs`.
KINDS = {
    "laptop": (
        r"python (first|warmer|own)\.py|(ls|mcore-rl (report|samples)|echo .* chat) runs/.*|"
        r"export PATH=.*|mkdir .*",
        "e2e/test_page_jobs",
    ),
    "new algorithm": (r"mcore-rl .*\branked.yaml.*|python -m pytest .*", "e2e/test_page_jobs"),
    "prints": (r"mcore-rl (--version|rl .*--(help|list-recipes|print-config).*)", "repo/test_docs"),
    "dry run": (r"mcore-rl rl .*--dry-run.*", "repo/test_docs"),
    "completion": (r'eval "\$\(mcore-rl completion bash\)"', "cli/test_completion"),
    "toy agents": (r"mcore-rl rl recipe=toy_\w+", "e2e/test_toy_agents"),
    "training": (r"(mcore-rl rl|bash launch/quickstart.sh)\b.*", "e2e/test_page_jobs"),
    "tutorials": (r"python train\.py( [\w/]+)?", "e2e/test_page_jobs"),
    "examples": (r"(torchrun .*)?mcore-rl (sft|dpo|rm) .*", "e2e/test_train_jobs"),
    "evaluation": (r"mcore-rl eval .*", "e2e/test_eval"),
    "chat": (r"mcore-rl chat .*", "e2e/test_chat"),
    "data": (r"mcore-rl data .*", "jobs/test_make_data"),
    "samples": (r"mcore-rl samples .*", "cli/test_samples"),
    "report": (r"mcore-rl report .*", "tools/test_report"),
    "servers": (r"mcore-rl servers .*", "cli/test_servers"),
    "convert config": (r"mcore-rl convert-config .*", "cli/test_convert_config"),
    "conversion": (r"mcore-rl convert .*|echo \w+ > .*", "dist_cpu/test_convert_docs"),
    "parity": (r"mcore-rl verify parity .*", "e2e/test_page_jobs"),
    "package": (r"pip (wheel|install) .*", "repo/test_package"),
    "launch plan of a model": (r"bash launch/run_dsv3.sh --dry-run .*", "repo/test_launch"),
    "launch plan": (r"bash launch/run_tiny.sh --dry-run", "repo/test_launch"),
    "plan": (r"mcore-rl plan reshard .*", "tools/test_plan_reshard"),
    "calibration": (
        r"mcore-rl plan (calibrate|simulate) recipe=.*|python benchmarks/simulated_quickstart.py.*",
        "e2e/test_simulated_quickstart",
    ),
    "planner": (r"mcore-rl plan (memory|step|layout|calibrate) .*", "planner/test_step"),
    "simulate": (r"mcore-rl plan simulate .*", "tools/test_simulate"),
    "doctor": (r"mcore-rl doctor\b.*", "tools/test_doctor"),
    "bench": (r"mcore-rl bench reshard\b.*", "benchmarks/test_reshard"),
    "data plane": (r"mcore-rl bench data-plane\b.*", "benchmarks/test_data_plane"),
    "kernels": (r"python benchmarks/csrc_kernels.py", "repo/test_csrc"),
    "tests": (r"pytest\b.*", "repo/test_lanes"),
    "set-up": (r"bash launch/setup_env.sh", "repo/test_pages"),  # by tests/run.sh
    "ci": (r"bash tests/run.sh.*", "repo/test_pages"),  # by .ci/run
}
NEEDS = {"GPUs", "a cluster", "a network", "an index of images", "TRL 1.16", "verifiers 0.4"}


@dataclass(frozen=True, slots=True)
class Command:
    page: str  # "docs/lora.md"
    text: str  # on one line, without comments, and without the folder of a program
    needs: str  # what it says to need; empty for none

    @property
    def kind(self) -> str:
        """The first that fits; empty for none."""
        return next((k for k, (form, _) in KINDS.items() if re.fullmatch(form, self.text)), "")

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def list_commands(page: Path) -> Iterator[Command]:
    """Yield the commands of the blocks of a page that are marked as bash."""
    for language, block in FENCE.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines() if language == "bash" else ():
            text, _, comment = line.partition(" # ")
            if text := re.sub(r"(^|\()\.venv/bin/", r"\1", " ".join(text.split())):
                needs = comment.strip().partition("needs ")
                yield Command(str(page.relative_to(ROOT)), text, "" if needs[0] else needs[2])


def select_commands(kind: str) -> list[Command]:
    """Return the commands of a kind, of all pages, that need nothing which tests lack."""
    return [c for page in PAGES for c in list_commands(page) if c.kind == kind and not c.needs]
