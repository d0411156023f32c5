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
    max_tokens: int | None = None,
) -> Proved:
    """The codec of a tokenizer's chat template: the first that is proved, one with tools if any.

    If that begins a new sample wherever a user speaks, another that can do as much and need not
    is taken. A family is known by what its renderer writes, not by the model's name. `options` are
    values of the template's own variables, such as enable_thinking; `stop_ids` are the ends of
    turns in generation_config.json, `max_tokens` those of a context: see `Proved`. Raises
    ConfigError, with the reason of each codec, where none is proved.
    """
    reasons: list[str] = []
    found: list[Proved] = []
    for proved in _proved(tokenizer, kind, options or {}, stop_ids, max_tokens, reasons):
        found.append(proved)
        if not proved.tool_refusal and proved.extends_users:
            break
    if not found:
        raise ConfigError(
            f"the tokenizer's chat template cannot be used over several turns, "
            f"with codec={kind}:\n" + "\n".join(f"  {reason}" for reason in reasons)
        )
    return _best(found)


def _best(found: Sequence[Proved]) -> Proved:
    with_tools = [one for one in found if not one.tool_refusal]
    first = with_tools[0] if with_tools else found[-1]  # the last is the template's own
    if first.extends_users:
        return first
    like_it = [
        one
        for one in found
        if bool(one.tool_refusal) <= bool(first.tool_refusal)
        and bool(one.parallel_refusal) <= bool(first.parallel_refusal)
    ]
    return next((one for one in like_it if one.extends_users), first)


def _proved(
    tokenizer: ChatTokenizer,
    kind: CodecKind,
    options: Mapping[str, JsonValue],
    stop_ids: Sequence[int],
    max_tokens: int | None,
    reasons: list[str],
) -> Iterator[Proved]:
    """Codecs that are proved; `reasons` gets those of the others.

    The template's own knows the ends of turns that a family has, too.
    """
    ends = {*stop_ids}
    if kind != "template":
        for family, variants in FAMILIES.items():
            for variant in variants:
                try:
                    known = RenderersCodec(tokenizer, family, options, variant, stop_ids)
                except ValueError as error:
                    reasons.append(f"renderers:{family}: {str(error).splitlines()[0]}")
                    continue
                try:
                    proved = Proved(known, Template(tokenizer, options), max_tokens)
                except ConfigError as error:
                    reasons.append(str(error))
                    continue
                ends |= proved.stop_ids
                yield proved
    if kind != "renderers":
        try:
            codec = TemplateCodec(tokenizer, options, sorted(ends))
            yield Proved(codec, Template(tokenizer, options), max_tokens)
        except ConfigError as error:
            reasons.append(f"template: {error}")
        except REFUSALS as error:
            reasons.append(f"template: the chat template cannot render a conversation: {error}")
