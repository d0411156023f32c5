"""SGLang as a rollout backend: a client of its native HTTP API, of a server that runs or a child.

Written against the source of SGLang 0.5.23 (its wheel on PyPI). Paths in comments are in its
folder `sglang/srt`.
"""
