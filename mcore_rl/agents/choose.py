"""Which codec a tokenizer's chats are written with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from mcore_rl.agents.codec import ChatTokenizer, JsonValue
from mcore_rl.agents.codec_proof import REFUSALS, Proved, Template
from mcore_rl.agents.renderers_codec import FAMILIES, RenderersCodec
from mcore_rl.agents.template_codec import TemplateCodec
from mcore_rl.config.errors import ConfigError

CodecKind = Literal["auto", "renderers", "template"]


def codec_for(
    tokenizer: ChatTokenizer,
    kind: CodecKind = "auto",
    options: Mapping[str, JsonValue] | None = None,
    stop_ids: Sequence[int] = (),
) -> Proved:
    """The codec of a tokenizer's chat template: the first that is proved, one with tools if any.

    A family is known by what its renderer writes, not by the model's name. `options` are values of
    the template's own variables, such as enable_thinking; `stop_ids` are the ends of turns in
    generation_config.json. Raises ConfigError, with the reason of each codec, where none is proved.
    """
    reasons: list[str] = []
    without_tools: Proved | None = None
    for proved in _proved(tokenizer, kind, options or {}, stop_ids, reasons):
        if not proved.tool_refusal:
            return proved
        without_tools = proved  # the last is the template's own
    if without_tools is None:
        raise ConfigError(
            f"the tokenizer's chat template cannot be used over several turns, "
            f"with codec={kind}:\n" + "\n".join(f"  {reason}" for reason in reasons)
        )
    return without_tools


def _proved(
    tokenizer: ChatTokenizer,
    kind: CodecKind,
    options: Mapping[str, JsonValue],
    stop_ids: Sequence[int],
    reasons: list[str],
) -> Iterator[Proved]:
    """Codecs that are proved; `reasons` gets those of the others."""
    if kind != "template":
        for family, variants in FAMILIES.items():
            for variant in variants:
                chosen = {**variant, **options}
                try:
                    codec = RenderersCodec(tokenizer, family, chosen)
                except ValueError as error:
                    reasons.append(f"renderers:{family}: {str(error).splitlines()[0]}")
                    continue
                try:
                    yield Proved(codec, Template(tokenizer, chosen))
                except ConfigError as error:
                    reasons.append(str(error))
    if kind != "renderers":
        try:
            yield Proved(TemplateCodec(tokenizer, options, stop_ids), Template(tokenizer, options))
        except ConfigError as error:
            reasons.append(f"template: {error}")
        except REFUSALS as error:
            reasons.append(f"template: the chat template cannot render a conversation: {error}")
