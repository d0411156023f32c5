"""mcore-rl verify parity: whether Megatron, transformers and vLLM agree on a model."""

from __future__ import annotations

import argparse
import json
import sys

from mcore_rl.cli.options import AXES, FAMILY, Parser, parse_layout
from mcore_rl.config.schema import Layout

_ABOUT = """\
Log-probs of the same tokens under Megatron (at the layout, whose ranks it
starts), transformers and vLLM (as sampled, and by a prefill). With vllm each
prompt is continued by 16 sampled tokens. Exit status: 0 when every pair is
within the tolerance, 1 when not, 2 for bad input. Where a pair is not, the
first module that differs is named."""
_TOLERANCE = (
    "bound on the largest difference of log-probs, in nats; default: 1e-4 in float32, 2.0 in "
    "bfloat16, where the mean is limited to 0.1 (rounding gives 1 at single tokens, 0.02 on "
    "average)"
)


def main(arguments: list[str]) -> None:
    """Compare the engines and print a report; exit with 1 if a pair is not within the tolerance."""
    options = build_parser().parse_args(arguments)
    layout = parse_layout("--layout", options.layout, Layout)
    from mcore_rl.jobs.parity.run import run  # imports torch: not for a bad option
    from mcore_rl.jobs.parity.settings import ParitySettings
    from mcore_rl.observability.console import get_stdout_console

    report = run(
        ParitySettings(
            model=options.model,
            layout=layout,
            against=tuple(dict.fromkeys(options.against.split(","))),
            dtype=options.dtype,
            tolerance=options.tolerance,
            prompts=options.prompts,
            reference=options.reference,
            checkpoint=options.checkpoint,
            vllm_tp=options.vllm_tp,
            timeout_s=options.timeout,
            family=options.family,
        )
    )
    if options.json:
        json.dump(report.to_json(), sys.stdout, indent=1, allow_nan=False)
        print()
    else:
        report.print(get_stdout_console())
    if not report.passed:
        raise SystemExit(1)


def build_parser() -> Parser:
    parser = Parser(prog="mcore-rl verify", description="Check that the engines agree.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="parity")
    parity = commands.add_parser(
        "parity", description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parity.add_argument
    add("--model", required=True, metavar="DIR", help="Hugging Face checkpoint")
    add("--layout", required=True, metavar="tp=2,ep=2", help=AXES)
    add("--against", required=True, metavar="hf,vllm", help="engines to compare Megatron with")
    add(
        "--prompts",
        default="",
        metavar="FILE",
        help="one prompt per line, or JSON lines with "
        '"prompt" or "prompt_ids"; default: random token ids',
    )
    add("--tolerance", type=float, metavar="X", help=_TOLERANCE)
    add("--dtype", default="float32", metavar="float32|bfloat16", help="default: float32")
    add("--reference", default="", metavar="DIR", help="what hf and vllm load; default: --model")
    add(
        "--checkpoint",
        default="",
        metavar="DIR",
        help="Megatron checkpoint that Megatron loads in place of the weights of --model",
    )
    add("--family", default="", metavar="FILE:NAME", help=FAMILY)
    add("--vllm-tp", type=int, default=1, metavar="N", help="workers of vLLM; default: 1")
    add(
        "--timeout",
        type=float,
        default=3600.0,
        metavar="S",
        help="seconds per request to an engine; default: 3600",
    )
    add("--json", action="store_true", help="print one JSON object")
    return parser
