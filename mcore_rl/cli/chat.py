"""mcore-rl chat: talk to a checkpoint, or to the last one of a run, in the terminal."""

from __future__ import annotations

import logging
import os
import warnings

from mcore_rl.cli.options import Parser
from mcore_rl.config.allowed import DTYPES, MAX_SEED
from mcore_rl.config.checks import check_at_least, check_between, check_choice, check_positive
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.limits import check_value
from mcore_rl.config.schema import StopTexts

_ABOUT = """\
Answers each line of standard input, from a terminal or a pipe. The conversation goes on until
/reset forgets it; /exit or the end of the input ends the program, Ctrl-C an answer."""


def main(arguments: list[str]) -> None:
    options = build_parser().parse_args(arguments)
    check_at_least("--temperature", options.temperature, 0)
    if not 0 < options.top_p <= 1:
        raise ConfigError(f"--top-p={options.top_p}; allowed: above 0, up to 1")
    check_at_least("--top-k", options.top_k, 0)
    check_value("--stop", options.stop, StopTexts)
    for name in ("max_tokens", "max_context", "tp", "kv_cache_bytes"):
        if (value := getattr(options, name)) is not None:
            check_at_least(f"--{name.replace('_', '-')}", value, 1)
    if options.seed is not None:
        check_between("--seed", options.seed, 0, MAX_SEED)
    check_choice("--dtype", options.dtype, (*DTYPES, "auto"))
    check_positive("--timeout", options.timeout)
    _silence_libraries()
    from mcore_rl.jobs.chat import ChatSettings, run  # imports torch: not for a bad option

    run(
        ChatSettings(
            model=options.model,
            system=options.system,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            stop=tuple(options.stop),
            max_tokens=options.max_tokens,
            max_context=options.max_context,
            seed=options.seed,
            dtype=options.dtype,
            tp=options.tp,
            kv_cache_bytes=options.kv_cache_bytes,
            timeout_s=options.timeout,
        )
    )


def _silence_libraries() -> None:
    """Keep the start-up messages of torch and vLLM out of the chat."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.simplefilter("ignore", FutureWarning)
    for name in ("torch._library.triton", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)


def build_parser() -> Parser:
    parser = Parser(prog="mcore-rl chat", description=_ABOUT)
    add = parser.add_argument
    add("model", metavar="DIR", help="Hugging Face checkpoint, or the output_dir of a run")
    add("--system", default="", metavar="TEXT", help="system prompt; default: none")
    add("--temperature", type=float, default=1.0, metavar="X", help="0 is greedy; default: 1")
    add("--top-p", type=float, default=1.0, metavar="X", help="default: 1, all tokens")
    add("--top-k", type=int, default=0, metavar="N", help="default: 0, all tokens")
    about = "an answer ends where it has this text; may be given several times"
    add("--stop", action="append", default=[], metavar="TEXT", help=about)
    add("--max-tokens", type=int, default=1024, metavar="N", help="of an answer; default: 1024")
    about = "tokens of a conversation, up to what the model takes; default: 8192"
    add("--max-context", type=int, default=8192, metavar="N", help=about)
    add("--seed", type=int, metavar="N", help="default: each answer is drawn anew")
    add(
        "--dtype",
        default="auto",
        metavar="auto|float32|bfloat16",
        help="default: of the device type",
    )
    add("--tp", type=int, default=1, metavar="N", help="tensor parallel; default: 1")
    about = "default: what a conversation needs"
    add("--kv-cache-bytes", type=int, metavar="N", help=about)
    add("--timeout", type=float, default=600.0, metavar="S", help="of the start; default: 600")
    return parser
