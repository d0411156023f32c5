"""Which fields of a request are done, which are not used, and which are refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from mcore_rl.agents.endpoint.refusal import RefusalError

_SHOWN = 200  # characters of a value, in errors
# Sampling is the trainer's.
SAMPLING = frozenset({
    "temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty",
    "repetition_penalty",
})  # fmt: skip
# These have no part in an answer.
BOOKKEEPING = frozenset({
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prediction", "cache_salt", "priority", "request_id",
})  # fmt: skip
# Answers of token ids have no text that these would change.
OF_TEXT = frozenset({
    "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
    "detokenize", "return_token_ids", "return_tokens_as_token_ids",
})  # fmt: skip
# Fields that change an answer, with the values at which they do not.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "logit_bias": ({},),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "bad_words": ([],),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "return_tokens_as_token_ids": (False,),
    "add_special_tokens": (False,),
    "echo": (False,),
}


class RequestBody(BaseModel):
    """The JSON of a request. A field that is null is one that is not there."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}

    def refuse_others(
        self, neutral: Mapping[str, tuple[object, ...]], unused: Collection[str] = ()
    ) -> None:
        """Refuse fields that this class does not have, and those with a value not in `neutral`.

        `unused` are the names that may have any value.

        Raises:
            RefusalError: the message names the first of them.
        """
        declared = {name: getattr(self, name) for name in type(self).model_fields}
        for name, value in {**declared, **(self.model_extra or {})}.items():
            is_known = name in declared and name not in neutral
            if not is_known and name not in unused and value is not None:
                refuse_unless(name, value, value in neutral.get(name, ()), neutral.get(name, ()))


def refuse_unless(
    field: str, value: object, is_allowed: bool, allowed: Collection[object] = ()
) -> None:
    if not is_allowed:
        names = ", ".join(map(repr, allowed)) or "none"
        message = f"{field}={repr(value)[:_SHOWN]} is not supported here; allowed: {names}"
        raise RefusalError(400, "unsupported", message, param=field)
