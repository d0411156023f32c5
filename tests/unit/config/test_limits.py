"""Limits of single settings: each kind, and that of every field through the checks of a job."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest

from mcore_rl.agents.chat_template.validation import CodecKind
from mcore_rl.agents.environments.coding import CodingSettings
from mcore_rl.config.allowed import CODECS, SERVER_BACKENDS
from mcore_rl.config.errors import ConfigError
from mcore_rl.config.limits import (
    Above,
    AtLeast,
    Between,
    Date,
    FieldsOf,
    Finite,
    Importable,
    Limit,
    Matches,
    MegatronName,
    MultipleOf,
    NotEmpty,
    OneOf,
    PoolName,
    Range,
    RowsOf,
    check_limit,
    list_limits,
)
from mcore_rl.config.rules import validate_rl
from mcore_rl.config.rules_train import validate_eval, validate_train
from mcore_rl.config.schema import (
    DPOConfig,
    EvalConfig,
    RewardTerm,
    RLConfig,
    RMConfig,
    SandboxSettings,
    ServedModelConfig,
    SFTConfig,
    TeacherModelConfig,
)
from mcore_rl.inference.registry import BACKENDS
from mcore_rl.rewards.code import CodeSettings

VALIDATE: dict[type, Callable[[Any], None]] = {
    RLConfig: validate_rl,
    SFTConfig: validate_train,
    DPOConfig: validate_train,
    RMConfig: validate_train,
    EvalConfig: validate_eval,
}
SCHEMAS = list(VALIDATE)
NAN, INF = math.nan, math.inf

KINDS = [
    (AtLeast(1), [1, 7], [0, -1, INF, NAN], "0; allowed: at least 1"),
    (AtLeast(0), [0, 0.5], [-1e-9, INF], "-1e-09; allowed: at least 0"),
    (Above(0), [1e-9, 3], [0, -1, INF, NAN], "0; allowed: above 0"),
    (Between(0, 1), [0, 0.5, 1], [-0.1, 1.1, INF, NAN], "-0.1; allowed: 0 to 1"),
    (
        Between(0, 1, includes_least=False),
        [0.1, 1],
        [0, 1.1, NAN],
        "0; allowed: above 0, up to 1",
    ),
    (
        Between(0, 1, includes_most=False),
        [0, 0.9],
        [1, -0.1, NAN],
        "1; allowed: at least 0, below 1",
    ),
    (MultipleOf(32), [32, 96], [48, 0, -32], "48; allowed: multiples of 32, at least one"),
    (
        Finite(),
        [0.5, "nan", [1.0], {"a": 1.0}],
        [NAN, [INF], {"a": NAN}],
        "nan; allowed: a finite number",
    ),
    (OneOf("a", "b"), ["a"], ["c", "x.py:Y", ""], "'c'; allowed: 'a', 'b'"),
    (
        OneOf("a", contract="Tool"),
        ["a", "x.py:Y"],
        ["c"],
        "'c'; allowed: 'a', or the import path of a Tool, path/to/file.py:Name",
    ),
    (
        PoolName("own"),
        ["own", "big_8"],
        ["2 GPUs", "auto", ""],
        "'2 GPUs'; allowed: 'own', or the name of a pool, of letters, digits and '_'",
    ),
    (PoolName("auto", "own"), ["auto"], ["a b"], "'a b'; allowed: 'auto', 'own', or the name of"),
    (Matches("[a-z]+", "letters"), ["ab"], ["a1", "a\n", ""], "'a1'; allowed: letters"),
    (NotEmpty("a folder"), ["x"], [""], "''; allowed: a folder"),
    (Date(), ["2024-02-29"], ["2023-02-29", "20240229", ""], "; allowed: a date, YYYY-MM-DD"),
    (Date(may_be_empty=True), ["2024-02-29", ""], ["today"], "'today'; allowed: a date"),
]


@pytest.mark.parametrize(
    ("limit", "inside", "outside", "message"), KINDS, ids=[repr(kind[0]) for kind in KINDS]
)
def test_values_outside_of_a_limit_are_refused_with_what_is_allowed(
    limit, inside, outside, message
):
    for value in inside:
        check_limit("key", value, limit)
    for value in outside:
        with pytest.raises(ConfigError, match=re.escape(f"key={value!r}; allowed: {limit}")):
            check_limit("key", value, limit)
    with pytest.raises(ConfigError, match=rf"^key=.*{re.escape(message)}"):
        check_limit("key", outside[0], limit)


@pytest.mark.parametrize("limit", [AtLeast(1), Above(0)])
def test_infinity_is_refused_as_not_finite(limit):
    with pytest.raises(ConfigError, match=r"key=inf; allowed: .*, finite$"):
        check_limit("key", INF, limit)


def list_outside(limit: Limit, is_float: bool) -> list[Any]:
    """Return values just outside of a limit, one at each end."""
    convert = float if is_float else int
    match limit:
        case AtLeast():
            return [convert(limit.least - 1)]
        case Above():
            return [convert(limit.bound)]
        case Between():
            least = limit.least - 1 if limit.includes_least else limit.least
            most = limit.most + 1 if limit.includes_most else limit.most
            return [convert(least), convert(most)]
        case MultipleOf():
            return [limit.size + 1]
        case MegatronName():
            return []  # tests/unit/engine/test_backends.py
        case Importable() | RowsOf():
            return []  # the registry or the reader checks them
        case Finite():
            return [NAN, INF]
        case NotEmpty():
            return [""]
    return ["no / name"]


def list_refused(hint: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield where in a value a limit is broken, the value, and the end of the error."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        for limit in hint.__metadata__:
            if isinstance(limit, FieldsOf):
                for name, inner in get_type_hints(limit.settings, include_extras=True).items():
                    for where, value, words in list_refused(inner):
                        yield f".{name}{where}", {name: value}, words
                yield ".no_such", {"no_such": 1}, " is unknown; allowed: "
                continue
            for value in list_outside(limit, parts[0] is float):
                yield "", value, f"={value!r}; allowed: {limit}"
        yield from list_refused(parts[0])
    elif origin in (Union, UnionType):
        for part in parts:
            yield from list_refused(part)
    elif origin is list:
        for where, value, words in list_refused(parts[0]):
            yield f"[0]{where}", [value], words
    elif origin is dict:
        for limit in list_limits(parts[0]):
            entry: Any = {} if "dict" in str(parts[1]) else "x"
            yield ".a b", {"a b": entry}, f"; allowed: names of {limit}"
        for where, value, words in list_refused(parts[1]):
            yield f".x{where}", {"x": value}, words


def list_cases(config: Any, key: str = "") -> Iterator[tuple[str, str, Any, str]]:
    """Yield the key of each setting with a limit, where in it, a value outside, and the error."""
    hints = get_type_hints(type(config), include_extras=True)
    for entry in fields(config):
        name, inner = f"{key}.{entry.name}".lstrip("."), getattr(config, entry.name)
        if is_dataclass(inner):
            yield from list_cases(inner, name)
            continue
        for where, value, words in list_refused(hints[entry.name]):
            yield name, where, value, words


def set_value(config: Any, key: str, value: Any) -> None:
    *groups, name = key.split(".")
    for group in groups:
        config = getattr(config, group)
    setattr(config, name, value)


def build(schema: type) -> Any:
    """Return settings that the checks of a job accept."""
    config = schema()
    set_value(config, "model.path", "m")
    data = "data.sets" if schema is EvalConfig else "data.train_file"
    set_value(config, data, {"a": "x"} if schema is EvalConfig else "x")
    return config


@pytest.mark.parametrize("schema", SCHEMAS)
def test_the_defaults_are_within_their_limits(schema):
    VALIDATE[schema](build(schema))


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_value_outside_of_the_limit_of_any_field_is_refused_with_its_full_key(schema):
    cases = [*list_cases(schema())]
    keys = {key + where for key, where, *_ in cases}
    roles = ("actor", "critic") if schema is RLConfig else ("engine",)
    assert schema is EvalConfig or {f"{role}.optimizer.lr" for role in roles} <= keys
    base = build(schema)
    for key, where, value, words in cases:
        config = copy.deepcopy(base)
        set_value(config, key, value)
        with pytest.raises(ConfigError) as error:
            VALIDATE[schema](config)
        assert str(error.value).startswith(f"{key}{where}{words}"), (key, where, value)


# Texts that may be any, and names that a registry above `config` checks.
FREE_TEXTS = re.compile(
    r"\.\w*(path|file|files|dir|column|project|success)$|\.(family|cores|targets)$"
    r"|SGLangConfig\.(url|api_key_env|python)|WeightSyncConfig\.bind_address"
    r"|AgentConfig\.(loop|tools|mcp_servers|environment)|(Curriculum|Reward)Config\.name"
    r"|RewardTerm\.name|(Algorithm|Critic|SFT)Config\.loss_aggregation|(Algorithm|DPO)Config\.loss"
    r"|AlgorithmConfig\.(advantage|kl_estimator)|FilterConfig\.(group_filter|keep_by)"
    r"|ReplayConfig\.priority|CheckpointConfig\.keep_best|ScoringConfig\.term"
    r"|ServedModelConfig\.(adapter|placement)"
)


def list_fields(cls: type) -> Iterator[tuple[str, Any, list[Limit]]]:
    """Yield name, type without limits, and limits of each field, those of groups included."""
    types, hints = get_type_hints(cls), get_type_hints(cls, include_extras=True)
    for entry in fields(cls):
        if is_dataclass(types[entry.name]):
            yield from list_fields(types[entry.name])
        else:
            limits = [*list_limits(hints[entry.name])]
            yield f"{cls.__name__}.{entry.name}", types[entry.name], limits


@pytest.mark.parametrize(
    "schema", [*SCHEMAS, ServedModelConfig, TeacherModelConfig, RewardTerm, SandboxSettings]
)
def test_every_number_has_a_range_and_every_text_a_limit_unless_any_will_do(schema):
    for name, kind, limits in list_fields(schema):
        kinds = {kind, *get_args(kind)}
        if kinds & {int, float}:
            assert any(isinstance(limit, Range) for limit in limits), name
        elif str in kinds and get_origin(kind) is not dict:
            assert limits or FREE_TEXTS.search(name), name


@pytest.mark.parametrize("settings", [CodeSettings, CodingSettings])
def test_other_defaults_of_a_subclass_have_the_limits_of_the_class(settings):
    hints, of_class = (get_type_hints(c, include_extras=True) for c in (settings, SandboxSettings))
    for name, hint in of_class.items():
        assert hints[name] == hint, name


def test_names_are_those_of_the_registries():
    assert get_args(CodecKind) == CODECS
    assert tuple(BACKENDS) == SERVER_BACKENDS


BOUNDS = [
    ("seed", 2**32, "4294967296; allowed: 0 to 4294967295"),
    ("task.name", "sudoku", "'sudoku'; allowed: '', 'calculator', 'code', 'countdown'"),
    ("model.dtype", "fp8", "'fp8'; allowed: 'float32', 'bfloat16', 'auto'"),
    ("actor.layout.tp", 0, "0; allowed: at least 1"),
    ("actor.layout.first_stage_layers", -1, "-1; allowed: at least 0"),
    ("warm_start.optimizer.lr", 0.0, "0.0; allowed: above 0"),
    ("critic.optimizer.beta2", 1.0, "1.0; allowed: at least 0, below 1"),
    ("actor.optimizer.name", "lion", "'lion'; allowed: 'adam', 'muon'"),
    ("actor.moe.aux_loss", "seq_aux_loss", "'seq_aux_loss'; allowed: 'aux_loss', 'global_aux"),
    ("rollout.temperature", 0.0, "0.0; allowed: above 0"),
    ("rollout.speculative.num_tokens", 129, "129; allowed: 0 to 128"),
    ("rollout.backend", "trtllm", "'trtllm'; allowed: 'vllm', 'sglang', or the import path of"),
    ("evaluation.top_p", 0.0, "0.0; allowed: above 0, up to 1"),
    ("sample_log.every", -1, "-1; allowed: at least 0"),
    ("data.curriculum.min_weight", 0.0, "0.0; allowed: 1e-06 to 1"),
    ("reward.on_error", "go", "'go'; allowed: 'stop', 'drop', 'zero'"),
    ("algorithm.correction.level", "word", "'word'; allowed: 'off', 'token', 'sequence', 'geom"),
    ("weight_sync.bucket_bytes", 48, "48; allowed: multiples of 32, at least one"),
    ("timeouts.call_s", NAN, "nan; allowed: above 0, finite"),
    ("checkpoint.export_to", "bucket", "'bucket'; allowed: a URL, such as s3://bucket/name"),
    ("placement.actor", "auto", "'auto'; allowed: 'shared', 'own', or the name of a pool"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "words"), BOUNDS, ids=[bound[0] for bound in BOUNDS])
def test_bounds_are_those_of_the_methods_and_libraries(key, value, words):
    config = build(RLConfig)
    set_value(config, key, value)
    with pytest.raises(ConfigError, match=f"^{re.escape(f'{key}={words}')}"):
        validate_rl(config)


OTHER_BOUNDS = [
    (SFTConfig, "data.max_tokens", 1, "1; allowed: at least 2"),
    (SFTConfig, "trainer.num_epochs", 0.0, "0.0; allowed: above 0"),
    (SFTConfig, "trainer.num_steps", -1, "-1; allowed: at least 0"),
    (SFTConfig, "trainer.batch_size", 0, "0; allowed: at least 1"),
    (SFTConfig, "evaluation.every", -1, "-1; allowed: at least 0"),
    (RMConfig, "data.max_tokens", 1, "1; allowed: at least 2"),
    (RMConfig, "data.long_rows", "cut", "'cut'; allowed: 'refuse', 'drop'"),
    (DPOConfig, "reference.placement", "auto", "'auto'; allowed: 'shared', 'own'"),
    (EvalConfig, "rollout.n", 1001, "1001; allowed: 1 to 1000"),
    (EvalConfig, "rollout.temperature", -1.0, "-1.0; allowed: at least 0"),
    (EvalConfig, "scoring.correct_from", -2e6, "-2000000.0; allowed: at least -1000000.0"),
    (EvalConfig, "resume", "here", "'here'; allowed: 'never', 'auto'"),
    (EvalConfig, "model.path", "", "''; allowed: a Hugging Face checkpoint, or the output_dir of"),
]


@pytest.mark.parametrize(("schema", "key", "value", "words"), OTHER_BOUNDS)
def test_bounds_of_supervised_jobs_and_evaluations(schema, key, value, words):
    config = build(schema)
    set_value(config, key, value)
    with pytest.raises(ConfigError, match=f"^{re.escape(f'{key}={words}')}"):
        VALIDATE[schema](config)


def test_an_evaluation_may_be_greedy():
    config = build(EvalConfig)
    config.rollout.temperature = 0.0
    validate_eval(config)


def test_entries_of_a_list_and_of_a_mapping_are_named():
    config = build(RLConfig)
    config.data.train_file, config.data.train_files = "", ["a", "b"]
    config.data.train_weights = [1.0, 0.0]
    with pytest.raises(ConfigError, match=r"^data.train_weights\[1\]=0.0; allowed: above 0$"):
        validate_rl(config)
    config.data.train_weights = []
    config.reward.terms = {"math": {"weight": NAN}}
    message = r"^reward.terms.math.weight=nan; allowed: -1000000.0 to 1000000.0$"
    with pytest.raises(ConfigError, match=message):
        validate_rl(config)
    config.reward.terms = {"math": {"weight": "1"}}
    with pytest.raises(ConfigError, match=r"^reward.terms.math.weight='1'; allowed: a number$"):
        validate_rl(config)
    config.reward.terms = {"math": {"wight": 1.0}}
    message = r"^reward.terms.math.wight is unknown; allowed: name, weight, settings$"
    with pytest.raises(ConfigError, match=message):
        validate_rl(config)
