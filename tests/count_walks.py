"""Count the files that a reader enters from an entry function to a goal, for four walks.

    python tests/count_walks.py            # the files of each walk, in order
    python tests/count_walks.py --chains   # also its functions, with their distance from the entry

The rule. The package is parsed (`ast`), and each function gets an edge to every function of the
package that it calls or passes on. A walk has legs, each from an entry to a goal. The functions of
a leg are those on any chain of calls from its entry to its goal: what may stand on the stack when
the goal runs. A file counts if it has

- a function of a leg,
- the declaration of a method through which a chain goes on (a protocol, an abstract class), where
  an editor jumps to, and the class that stands for it,
- a function or class that makes an argument or the object of a call on a chain, in the caller,
- what connects a chain where no call is written down: the registry that names a class, the two ends
  of a remote call.

A method is resolved by types: annotations of parameters, attributes and results, and constructors.
An abstract class stands for the class that a default run creates (`CONCRETE`). A method named on a
class of workers, as in `group.call(ModelWorker.update, batch)`, is called on the workers. Calls
through parameters, strings and registries are in `BY_NAME`. Nothing else is assumed: a call that
cannot be resolved has no edge, so a new registry or callback on a walk must be added to a table, or
the walk breaks, which is an error.

A setting is read out of an object that passes through functions that do not read it. Its walk has
the files that read, rename, convert, declare or use it. Those that only pass the settings on are
counted apart.

Long because: the tables of the rule and the resolver that reads them are one subject.
"""

from __future__ import annotations

import ast
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "mcore_rl"

# The class that a default run creates.
CONCRETE: Mapping[str, str] = {
    "cli.main:Command": "cli.job:JobCommand",
    "trainers.base:RLTrainer": "trainers.sync:SyncTrainer",
    "engine.base:BaseEngine": "engine.megatron.engine:MegatronEngine",
    "controller.dispatch:RankGroup": "controller.worker_group:WorkerGroup",
    "trainers.device_sharing:WeightSync": "rollout.weight_updater:TransportSync",
    "rollout.weight_updater:WeightSync": "rollout.weight_updater:TransportSync",
    "weight_sync.transport:WeightTransport": "weight_sync.process_group:ProcessGroupTransport",
    "weight_sync.transport:ExchangeTransport": "weight_sync.process_group:ProcessGroupTransport",
    "reshard.executor:MessageTransport": "reshard.executor:GroupTransport",
    "inference.protocol:Generator": "inference.vllm.server:VLLMServer",
    "inference.protocol:GenerationServer": "inference.vllm.server:VLLMServer",
    "agents.loops:AgentLoop": "agents.loops:ToolLoop",
    "agents.loops:Agent": "agents.runner:AgentRunner",
    "agents.chat_template.codec:ChatCodec": "agents.chat_template.codec:ValidatedChatTemplate",
    "agents.chat_template.codec:NamedCodec": "agents.chat_template.template_codec:TemplateCodec",
}
# Files that choose the class, if neither declares it nor is it.
CHOSEN_BY: Mapping[str, str] = {
    "engine.base:BaseEngine": "engine/megatron/engine.py",
    "agents.chat_template.codec:NamedCodec": "agents/chat_template/validation.py",
}
# Classes of workers, whose methods a group calls. The call goes through these files.
WORKERS = ("engine.worker:ModelWorker", "rollout.worker:RolloutWorker")
REMOTE_CALL = ("controller/worker_group.py", "controller/worker_process.py")
# Functions that are called by a string, a parameter, a field or a registry: caller, the name in its
# code that stands for the call, callee, files between them.
BY_NAME = (
    ("cli.job:JobCommand.main", "run", "cli.job:_run_rl", ()),
    ("engine.steps:sum_losses", "loss_function", "trainers.policy_loss:PolicyLoss.__call__", ()),
    (
        "trainers.policy_loss:PolicyLoss._compute_policy_loss",
        "bind",
        "algorithms.losses:ppo_clip",
        ("algorithms/registry.py",),
    ),
    (
        "rollout.weight_updater:TransportSync._send",
        "attempt",
        "rollout.worker:RolloutWorker.receive_weights",
        ("rollout/server_pool.py",),
    ),
    (
        "inference.vllm.server:update_workers",
        "_call_workers",
        "inference.vllm.weights:ShardTransferEngine.update_weights",
        ("inference/vllm/worker.py",),
    ),
)


@dataclass(frozen=True)
class Walk:
    """A path through the package that a reader follows, and the number of files to aim at."""

    name: str
    legs: tuple[tuple[str, str], ...]  # entry and goal
    aim: int
    declares: tuple[str, ...] = ()  # classes whose fields the walk reads
    passing: tuple[tuple[str, str], ...] = ()  # legs of files that only pass the settings on


def build_legs(entry: str, *goals: str) -> tuple[tuple[str, str], ...]:
    """Return a leg from the entry to each goal."""
    return tuple((entry, goal) for goal in goals)


WALKS = (
    Walk(
        "`mcore-rl rl` to the policy loss",
        build_legs("cli.main:main", "algorithms.losses:ppo_clip"),
        aim=22,
    ),
    Walk(
        "a weight update, from engine to vLLM",
        build_legs(
            "trainers.device_sharing:DeviceSharing.update_weights",
            "engine.megatron.weights:get_local_tensors",
            "reshard.executor:GroupTransport.start",
            "inference.vllm.weights:ShardWriter.write",
        ),
        aim=18,
    ),
    Walk(
        "one agent turn",
        build_legs(
            "agents.runner:AgentRunner._run",
            "agents.chat_template.codec:TemplateRenderer.render",
            "agents.chat_template.template_codec:TemplateCodec.extend",
            "inference.vllm.server:VLLMServer._generate",
            "agents.chat_template.template_codec:TemplateCodec.parse",
            "agents.tools.base:ToolSet.call",
        ),
        aim=9,
    ),
    Walk(
        "`algorithm.loss_settings.clip_ratio_high`, from YAML to use",
        (
            ("cli.compose:compose_config", "cli.compose:_read_yaml"),
            *build_legs(
                "trainers.policy_loss:PolicyLoss.__call__",
                "algorithms.registry:Registry.build_settings",
                "algorithms.losses:ppo_clip",
            ),
        ),
        aim=6,
        declares=("config.schema:AlgorithmConfig", "config.schema:PPOClipSettings"),
        passing=build_legs("cli.job:JobCommand.main", "trainers.base:RLTrainer.build_loss"),
    ),
)


@dataclass
class Module:
    """A parsed file."""

    name: str  # "engine.base"
    path: Path
    tree: ast.Module
    names: dict[str, str] = field(default_factory=dict)  # local name: "module:Name" or "module"


@dataclass
class Class:
    """A class of the package."""

    key: str  # "engine.base:BaseEngine"
    module: Module
    node: ast.ClassDef
    bases: list[str] = field(default_factory=list)
    functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = field(default_factory=dict)
    attributes: dict[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class Value:
    """The classes that an expression, or an item of it, may be of."""

    classes: frozenset[str] = frozenset()
    # Classes of the arguments of a Callable[[...], ...].
    arguments: tuple[frozenset[str], ...] = ()


NOTHING = Value()
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


class Package:
    """All modules of the package, with the edges between their functions."""

    def __init__(self, root: Path = ROOT) -> None:
        self.modules: dict[str, Module] = {}
        self.classes: dict[str, Class] = {}
        self.functions: dict[str, tuple[Module, ast.FunctionDef | ast.AsyncFunctionDef, str]] = {}
        self.edges: dict[str, dict[str, set[str]]] = {}  # caller: callee: files between them
        # What makes the arguments of a call: by caller and callee, functions and classes.
        self.makers: dict[tuple[str, str], set[str]] = {}
        self.root = root / PACKAGE
        for path in sorted(self.root.rglob("*.py")):
            self._parse(path)
        for path in sorted((root / "models").glob("*.py")):  # mcore_rl/models is a link
            if f"models.{path.stem}" not in self.modules:
                self._parse(self.root / "models" / path.name)
        for module in self.modules.values():
            self._collect(module)
        for cls in self.classes.values():
            cls.bases = [
                key for base in cls.node.bases if (key := self._resolve_class(cls.module, base))
            ]
        for cls in self.classes.values():
            self._infer_attributes(cls)
        for caller, _, callee, _ in BY_NAME:
            self._require(caller)
            self._require(callee)
        for key, (module, node, owner) in list(self.functions.items()):
            _Scanner(self, module, key, owner).scan(node)

    def _parse(self, path: Path) -> None:
        parts = path.relative_to(self.root).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        self.modules[name] = Module(name, path, ast.parse(path.read_text(encoding="utf-8")))

    def _require(self, key: str) -> None:
        if key not in self.functions:
            raise SystemExit(f"{key} is no function of the package: mend the tables of {__file__}")

    def _collect(self, module: Module) -> None:
        """Record imports (also those inside functions), classes and functions of a module."""
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
                source = (node.module or "").removeprefix(PACKAGE).lstrip(".")
                for alias in node.names:
                    inner = f"{source}.{alias.name}".lstrip(".")
                    target = inner if inner in self.modules else f"{source}:{alias.name}"
                    module.names[alias.asname or alias.name] = target
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                cls = Class(f"{module.name}:{node.name}", module, node)
                self.classes[cls.key] = cls
                module.names[node.name] = cls.key
                for item in node.body:
                    if isinstance(item, _FUNCTIONS):
                        cls.functions[item.name] = item
                        self.functions[f"{cls.key}.{item.name}"] = (module, item, cls.key)
            elif isinstance(node, _FUNCTIONS):
                module.names[node.name] = f"{module.name}:{node.name}"
                self.functions[f"{module.name}:{node.name}"] = (module, node, "")

    def _resolve_class(self, module: Module, node: ast.expr) -> str:
        if isinstance(node, ast.Subscript):
            node = node.value
        if isinstance(node, ast.Name):
            key = module.names.get(node.id, "")
            return key if key in self.classes else ""
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            key = f"{module.names.get(node.value.id, '')}:{node.attr}"
            return key if key in self.classes else ""
        return ""

    def read_annotation(self, module: Module, node: ast.expr | None, owner: str = "") -> Value:
        """Return the classes that an annotation mentions; of a Callable those of its arguments."""
        if node is None:
            return NOTHING
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                node = ast.parse(node.value, mode="eval").body
            except SyntaxError:
                return NOTHING
        if isinstance(node, ast.BinOp):
            sides = [self.read_annotation(module, side, owner) for side in (node.left, node.right)]
            return _join(*sides)
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.value, ast.Name)
            and node.value.id == "Callable"
        ):
            if isinstance(node.slice, ast.Tuple) and isinstance(node.slice.elts[0], ast.List):
                arguments = node.slice.elts[0].elts
                read = [self.read_annotation(module, argument, owner) for argument in arguments]
                return Value(arguments=tuple(value.classes for value in read))
            return NOTHING
        classes = set()
        for part in ast.walk(node):
            if isinstance(part, ast.Name | ast.Attribute) and (
                key := self._resolve_class(module, part)
            ):
                classes.add(key)
            if isinstance(part, ast.Name) and part.id == "Self" and owner:
                classes.add(owner)
        return Value(frozenset(classes))

    def _infer_attributes(self, cls: Class) -> None:
        for node in cls.node.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                value = self.read_annotation(cls.module, node.annotation, cls.key)
                cls.attributes[node.target.id] = value
        for method in cls.functions.values():
            scanner = _Scanner(self, cls.module, "", cls.key)
            scanner.bind_arguments(method)
            for node in ast.walk(method):
                targets: list[tuple[ast.expr, Value]] = []
                if isinstance(node, ast.AnnAssign):
                    targets = [
                        (node.target, self.read_annotation(cls.module, node.annotation, cls.key))
                    ]
                elif isinstance(node, ast.Assign):
                    for target in node.targets:
                        targets += _pair(target, node.value, scanner)
                for target, value in targets:
                    is_own = isinstance(target, ast.Attribute) and isinstance(
                        target.value, ast.Name
                    )
                    if is_own and target.value.id == "self" and value != NOTHING:  # type: ignore[attr-defined,union-attr]
                        name = target.attr  # type: ignore[union-attr]
                        cls.attributes[name] = _join(cls.attributes.get(name, NOTHING), value)

    def list_ancestors(self, key: str) -> list[str]:
        """Return a class and its bases, in the order in which methods are looked up."""
        ancestors = [key]
        for base in self.classes[key].bases:
            ancestors += [name for name in self.list_ancestors(base) if name not in ancestors]
        return ancestors

    def find_method(self, key: str, name: str) -> list[tuple[str, tuple[str, ...]]]:
        """Return the functions that a method call enters, with the files that it goes through."""
        files: tuple[str, ...] = ()
        if key in CONCRETE:
            declared = self._look_up(key, name)
            files = (CHOSEN_BY[key],) if key in CHOSEN_BY else ()
            files += (
                self.get_file(CONCRETE[key]),
                *([self.get_file(declared)] if declared else []),
            )
            key = CONCRETE[key]
        function = self._look_up(key, name)
        return [(function, files)] if function else []

    def _look_up(self, key: str, name: str) -> str:
        for ancestor in self.list_ancestors(key):
            if name in self.classes[ancestor].functions:
                return f"{ancestor}.{name}"
        return ""

    def get_attribute(self, key: str, name: str) -> Value:
        """Return the value of an attribute of a class."""
        for ancestor in self.list_ancestors(CONCRETE.get(key, key)):
            if name in self.classes[ancestor].attributes:
                return self.classes[ancestor].attributes[name]
        return NOTHING

    def get_file(self, key: str) -> str:
        """Return the file of a function or class, below the package."""
        module = self.modules[key.partition(":")[0]]
        return module.path.relative_to(self.root).as_posix()

    def add_makers(self, caller: str, callee: str, makers: set[str]) -> None:
        self.makers.setdefault((caller, callee), set()).update(makers)

    def add_edge(self, caller: str, callee: str, files: Sequence[str] = ()) -> None:
        self.edges.setdefault(caller, {}).setdefault(callee, set()).update(files)


def _join(*values: Value) -> Value:
    classes = frozenset().union(*(value.classes for value in values))
    arguments = next((value.arguments for value in values if value.arguments), ())
    return Value(classes, arguments)


def _pair(target: ast.expr, value: ast.expr, scanner: _Scanner) -> list[tuple[ast.expr, Value]]:
    """Pair the targets of an assignment with their values."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        pairs = zip(target.elts, value.elts, strict=False)
        return [pair for inner, part in pairs for pair in _pair(inner, part, scanner)]
    result = scanner.evaluate(value)
    if isinstance(target, ast.Tuple):
        return [(inner, result) for inner in target.elts]
    return [(target, result)]


class _Scanner(ast.NodeVisitor):
    """Infers the values of names in a function, and records its edges. Nested functions are part
    of it.
    """

    def __init__(self, package: Package, module: Module, key: str, owner: str) -> None:
        self.package, self.module, self.key, self.owner = package, module, key, owner
        self.names: dict[str, Value] = {}
        self.makers: dict[str, set[str]] = {}  # by name: functions and classes its value is made by

    def bind_arguments(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        arguments = node.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            value = self.package.read_annotation(self.module, argument.annotation, self.owner)
            self.names[argument.arg] = value
        if self.owner:
            self.names["self"] = self.names["cls"] = Value(frozenset({self.owner}))

    def scan(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Record the edges of a function."""
        self.bind_arguments(node)
        for statement in node.body:
            self.visit(statement)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before = dict(self.names)
        for argument in (*node.args.args, *node.args.kwonlyargs):
            self.names[argument.arg] = self.package.read_annotation(
                self.module, argument.annotation, self.owner
            )
        for statement in node.body:
            self.visit(statement)
        self.names = before

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)  # type: ignore[arg-type]

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            for inner, value in _pair(target, node.value, self):
                self._bind(inner, value, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
        value = self.package.read_annotation(self.module, node.annotation, self.owner)
        self._bind(node.target, value, node.value)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self._bind(node.target, self.evaluate(node.value), node.value)

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            self.visit(item.context_expr)
            value = self.evaluate(item.context_expr)
            for key in value.classes:
                for name in ("__enter__", "__aenter__", "__exit__", "__aexit__"):
                    self._record(self.package.find_method(key, name))
            if item.optional_vars is not None:
                self._bind(item.optional_vars, value, item.context_expr)
        for statement in node.body:
            self.visit(statement)

    visit_AsyncWith = visit_With

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        self._bind(node.target, self.evaluate(node.iter), node.iter)
        for statement in (*node.body, *node.orelse):
            self.visit(statement)

    visit_AsyncFor = visit_For

    def _visit_comprehension(self, node: ast.expr) -> None:
        for generator in node.generators:  # type: ignore[attr-defined]
            self.visit(generator.iter)
            self._bind(generator.target, self.evaluate(generator.iter), generator.iter)
            for condition in generator.ifs:
                self.visit(condition)
        for name in ("elt", "key", "value"):
            if (part := getattr(node, name, None)) is not None:
                self.visit(part)

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _visit_comprehension

    def visit_Name(self, node: ast.Name) -> None:
        target = self.module.names.get(node.id, "")
        if node.id not in self.names and target in self.package.functions:
            self._record([(target, ())])

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.visit(node.value)
        for callee, files in self._find_attribute(node):
            self._record([(callee, files)])

    def visit_Call(self, node: ast.Call) -> None:
        self.visit(node.func)
        self._record(self._find_callees(node.func), node)
        self._record(self._find_worker_methods(node), node)
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        for caller, written, callee, files in BY_NAME:
            if (self.key, name) == (caller, written):
                self._record([(callee, files)], node)
        if name == "partial" and node.args:
            self._record(self._find_callees(node.args[0]), node)
        called = self.evaluate(node.func)
        if isinstance(node.func, ast.Name | ast.Attribute) and (key := self._get_class(node.func)):
            for name in ("__init__", "__post_init__"):
                self._record(self.package.find_method(key, name), node)
        elif isinstance(node.func, ast.Name | ast.Call):
            for key in called.classes:
                self._record(self.package.find_method(key, "__call__"), node)
        parameters = self._list_parameters(node)
        for argument, parameter in parameters:
            if isinstance(argument, ast.Lambda):
                for name, classes in zip(argument.args.args, parameter.arguments, strict=False):
                    self.names[name.arg] = Value(classes)
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            self.visit(argument)

    def _list_parameters(self, node: ast.Call) -> list[tuple[ast.expr, Value]]:
        """Pair the arguments of a call with the annotations of the callee's parameters."""
        pairs: list[tuple[ast.expr, Value]] = []
        for callee, _ in self._find_callees(node.func):
            module, function, owner = self.package.functions[callee]
            names = [
                argument for argument in function.args.args if argument.arg not in ("self", "cls")
            ]
            by_name = {argument.arg: argument for argument in (*names, *function.args.kwonlyargs)}
            matched = list(zip(node.args, names, strict=False))
            matched += [(k.value, by_name[k.arg]) for k in node.keywords if k.arg in by_name]
            for argument, parameter in matched:
                value = self.package.read_annotation(module, parameter.annotation, owner)
                pairs.append((argument, value))
        return pairs

    def _find_callees(self, node: ast.expr) -> list[tuple[str, tuple[str, ...]]]:
        if isinstance(node, ast.Name):
            target = self.module.names.get(node.id, "")
            return [(target, ())] if target in self.package.functions else []
        return self._find_attribute(node) if isinstance(node, ast.Attribute) else []

    def _find_attribute(self, node: ast.Attribute) -> list[tuple[str, tuple[str, ...]]]:
        """Return the functions that `value.name` may be."""
        if isinstance(node.value, ast.Name) and node.value.id not in self.names:
            source = self.module.names.get(node.value.id, "")
            if f"{source}:{node.attr}" in self.package.functions:
                return [(f"{source}:{node.attr}", ())]
        if isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super":
            ancestors = self.package.list_ancestors(self.owner)[1:] if self.owner else []
            owners = [key for key in ancestors if node.attr in self.package.classes[key].functions]
            return [(f"{owners[0]}.{node.attr}", ())] if owners else []
        if (worker := self._get_class(node.value)) in WORKERS:
            return [(key, REMOTE_CALL) for key, _ in self.package.find_method(worker, node.attr)]
        classes = self.evaluate(node.value).classes
        return [c for key in classes for c in self.package.find_method(key, node.attr)]

    def _find_worker_methods(self, node: ast.Call) -> list[tuple[str, tuple[str, ...]]]:
        """Return the methods of workers that `group.call` or `group.submit` is given."""
        if getattr(node.func, "attr", "") not in ("call", "submit") or not node.args:
            return []
        declares = tuple(file for _, files in self._find_callees(node.func) for file in files)
        return [
            (callee, (*declares, *files))
            for part in ast.walk(node.args[0])
            if isinstance(part, ast.Attribute) and self._get_class(part.value) in WORKERS
            for callee, files in self._find_attribute(part)
        ]

    def _get_class(self, node: ast.expr) -> str:
        """Return the class that an expression names."""
        if isinstance(node, ast.Name) and node.id in self.names:
            return ""
        return self.package._resolve_class(self.module, node)

    def _bind(self, target: ast.expr, value: Value, source: ast.expr | None = None) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = value
            if source is not None:
                self.makers.setdefault(target.id, set()).update(self._list_makers(source))
        elif isinstance(target, ast.Tuple):
            for inner in target.elts:
                self._bind(inner, value, source)

    def _list_makers(self, node: ast.AST) -> set[str]:
        """Return the functions and classes that the value of an expression is made by."""
        makers: set[str] = set()
        for part in ast.walk(node):
            if isinstance(part, ast.Name):
                makers |= self.makers.get(part.id, set())
            elif isinstance(part, ast.Call):
                if key := self._get_class(part.func):
                    makers.add(key)
                makers |= {callee for callee, _ in self._find_callees(part.func)}
        return makers

    def _record(
        self, callees: Sequence[tuple[str, tuple[str, ...]]], call: ast.Call | None = None
    ) -> None:
        for callee, files in callees:
            if self.key and callee in self.package.functions:
                self.package.add_edge(self.key, callee, files)
                if call is not None:
                    parts = (call.func, *call.args, *(keyword.value for keyword in call.keywords))
                    makers = set().union(*map(self._list_makers, parts)) - {callee}
                    self.package.add_makers(self.key, callee, makers)

    def evaluate(self, node: ast.expr) -> Value:
        """Return the classes that an expression may be of; of a container those of its items."""
        if isinstance(node, ast.Name):
            if node.id in self.names:
                return self.names[node.id]
            key = self._get_class(node)
            return Value(frozenset({key})) if key else self._read_global(node.id)
        if isinstance(node, ast.Attribute):
            if key := self._get_class(node):
                return Value(frozenset({key}))
            return _join(NOTHING, *self._evaluate_attribute(node))
        if isinstance(node, ast.Call):
            return self._evaluate_call(node)
        if isinstance(node, ast.Await | ast.Starred | ast.Subscript | ast.NamedExpr):
            return self.evaluate(node.value)
        if isinstance(node, ast.IfExp):
            return _join(self.evaluate(node.body), self.evaluate(node.orelse))
        if isinstance(node, ast.BoolOp):
            return _join(*map(self.evaluate, node.values))
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return _join(NOTHING, *map(self.evaluate, node.elts))
        if isinstance(node, ast.Dict):
            return _join(NOTHING, *map(self.evaluate, node.values))
        if isinstance(node, ast.ListComp | ast.GeneratorExp | ast.SetComp):
            before = dict(self.names)
            for generator in node.generators:
                self._bind(generator.target, self.evaluate(generator.iter))
            value = self.evaluate(node.elt)
            self.names = before
            return value
        return NOTHING

    def _read_global(self, name: str) -> Value:
        """Return the value of a variable of a module, by its annotation or constructor."""
        target = self.module.names.get(name, f"{self.module.name}:{name}")
        source, _, variable = target.partition(":")
        module = self.package.modules.get(source)
        for node in module.tree.body if module and variable else ():
            if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == variable:
                return self.package.read_annotation(module, node.annotation)  # type: ignore[arg-type]
        return NOTHING

    def _evaluate_attribute(self, node: ast.Attribute) -> Iterator[Value]:
        for key in self.evaluate(node.value).classes:
            yield self.package.get_attribute(key, node.attr)
            for callee, _ in self.package.find_method(key, node.attr):
                module, function, owner = self.package.functions[callee]
                decorators = [
                    getattr(d, "id", getattr(d, "attr", "")) for d in function.decorator_list
                ]
                if any(name.endswith("property") for name in decorators):
                    yield self.package.read_annotation(module, function.returns, owner)

    def _evaluate_call(self, node: ast.Call) -> Value:
        if key := self._get_class(node.func):
            return Value(frozenset({key}))
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if name in ("enter_context", "enter_async_context", "replace", "closing") and node.args:
            return self.evaluate(node.args[0])
        values = []
        for callee, _ in self._find_callees(node.func):
            module, function, owner = self.package.functions[callee]
            if function.name not in ("__init__", "__post_init__"):
                values.append(self.package.read_annotation(module, function.returns, owner))
        if not values and isinstance(
            node.func, ast.Name | ast.Call
        ):  # of a class held in a variable
            values.append(Value(self.evaluate(node.func).classes))
        return _join(NOTHING, *values)


def list_functions(package: Package, entry: str, goal: str) -> dict[str, int]:
    """Return the functions on the chains from entry to goal, with their distance from the entry.

    Raises:
        SystemExit: No chain leads from one to the other.
    """
    for key in (entry, goal):
        if key not in package.functions and not key.endswith("__init__"):
            raise SystemExit(f"{key} is no function of the package: mend WALKS of {__file__}")
    distance, queue = {entry: 0}, deque([entry])
    while queue:
        caller = queue.popleft()
        for callee in package.edges.get(caller, ()):
            if callee not in distance:
                distance[callee] = distance[caller] + 1
                if callee != goal:
                    queue.append(callee)
    callers: dict[str, set[str]] = {}
    for caller, callees in package.edges.items():
        for callee in callees:
            callers.setdefault(callee, set()).add(caller)
    leads, queue = {goal}, deque([goal])
    while queue:
        for caller in callers.get(queue.popleft(), ()):
            if caller not in leads and caller in distance:
                leads.add(caller)
                queue.append(caller)
    if entry not in leads:
        raise SystemExit(f"no chain of calls leads from {entry} to {goal}")
    return {key: distance[key] for key in sorted(leads, key=lambda k: (distance[k], k))}


def list_files(
    package: Package, legs: Sequence[tuple[str, str]], declares: Sequence[str] = ()
) -> list[str]:
    """Return the files of a walk, in the order in which its legs enter them."""
    files: dict[str, None] = {}
    for entry, goal in legs:
        functions = list_functions(package, entry, goal)
        for key in functions:
            files.setdefault(package.get_file(key))
            for callee, between in package.edges.get(key, {}).items():
                if callee in functions and key != goal:
                    made = {
                        package.get_file(maker) for maker in package.makers.get((key, callee), ())
                    }
                    files.update(dict.fromkeys(sorted(between | made)))
    for key in declares:
        files.setdefault(package.get_file(key))
    return list(files)


def main(arguments: Sequence[str]) -> None:
    package = Package()
    for walk in WALKS:
        files = list_files(package, walk.legs, walk.declares)
        print(f"{walk.name}: {len(files)} files (aim: {walk.aim})")
        print("\n".join(f"  {file}" for file in files))
        if passing := [f for f in list_files(package, walk.passing) if f not in files]:
            print(f"  passed on by {len(passing)} more: {', '.join(passing)}")
        if "--chains" in arguments:
            for entry, goal in walk.legs:
                for key, distance in list_functions(package, entry, goal).items():
                    print(f"    {distance:3d} {key}")


if __name__ == "__main__":
    main(sys.argv[1:])
