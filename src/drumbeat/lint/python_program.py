"""Checks of a training script as a program: what its syntax tree shows and no single line does."""

from __future__ import annotations

import ast
import builtins
import re
import sys
import warnings
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

from drumbeat.base.regex import regex
from drumbeat.base.text import some
from drumbeat.lint.context import Hit, by_name

_RANK = regex(r"(?i)rank|main_process|is_main|is_master|master_process|should_save|primary|leader|coordinator")
_GLOBAL_RANK = regex(
    r"(?:int\()?(?:(?:\w+\.)*get_rank\(\)|os\.environ\[['\"]RANK['\"]\]|os\.environ\.get\(['\"]RANK['\"].*?\)|"
    r"os\.getenv\(['\"]RANK['\"].*?\))\)?"
)
_COMPUTES = (
    ast.BinOp, ast.BoolOp, ast.UnaryOp, ast.Compare, ast.IfExp, ast.NamedExpr, ast.JoinedStr, ast.FormattedValue, ast.Lambda,
)  # fmt: skip
_DEEPEST = 5  # callers of callers that are looked at
_MOST_NODES = 200_000  # a longer program is generated, and nobody's own
_KNOWN_ELSEWHERE = {"__file__", "__name__", "__doc__", "__path__", "__spec__", "__builtins__", "get_ipython", "display"}


class Program(NamedTuple):
    tree: ast.Module
    text: str
    first: int  # line of its first line in the file
    complete: bool  # a whole script, not an excerpt
    read: Callable[[str], str] = lambda path: ""  # the text of a file beside it; '' if it is not there

    def line(self, node: ast.AST) -> int:
        return self.first + int(getattr(node, "lineno", 1)) - 1


def syntax_tree(text: str) -> Optional[ast.Module]:
    """Return the syntax tree of a Python program; None if it is not Python that can be read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def parse(text: str, first: int, complete: bool, read: Callable[[str], str] = lambda path: "") -> Optional[Program]:
    """Parse; None if it is not Python that can be read: an excerpt with dots, another language."""
    tree = syntax_tree(text)
    if tree is None or sum(1 for _ in ast.walk(tree)) > _MOST_NODES:
        return None
    _use_own_names(tree)
    return Program(tree, text, first, complete or "__main__" in text, read)


def _use_own_names(tree: ast.Module) -> None:
    """Call what is imported under another name (`from torch.nn.parallel import DistributedDataParallel as D`) by its own."""
    own = {}
    for node in ast.walk(tree):
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            if alias.asname:
                own[alias.asname], alias.asname = alias.name, None
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in own:
            node.id = own[node.id]


def _name(node: ast.AST) -> str:
    """Return `torch.optim.Adam` of the tree; empty for anything that is not a plain name."""
    parts: List[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        return ".".join([node.id, *reversed(parts)])
    return "." + ".".join(reversed(parts)) if parts else ""


def _calls(tree: ast.AST, ends: str) -> Iterator[ast.Call]:
    """Yield calls of a function or method by the last part of its name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node.func).rpartition(".")[2] == ends:
            yield node


def _distributed(program: Program) -> bool:
    return bool(
        re.search(r"init_process_group|DistributedDataParallel|fully_shard|FullyShardedDataParallel", program.text)
    )


# A training loop, and any word of a program that may use more than one GPU: in doubt it does.
_TRAINS = regex(r"\.backward\(")
_MAY_BE_MANY = regex(
    r"(?i)distribut|rank|process_group|parallel|accelerat|deepspeed|lightning|trainer|fabric|horovod|hvd|jax|world|mesh|strategy|spawn"
)


def in_one_process(text: str) -> bool:
    """Return true for a program that trains and shows no sign of more than one process."""
    return bool(_TRAINS.search(text)) and not _MAY_BE_MANY.search(text)


def one_process(program: Program) -> Iterator[Hit]:
    back = next(_calls(program.tree, "backward"), None)
    if program.complete and back and in_one_process(program.text):
        yield Hit(program.line(back))


# Whatever may give ranks one model or one gradient: a name that the program uses, not one that it only imports.
_MAY_AVERAGE = regex(
    r"(?i)parallel|ddp|fsdp|shard|reduce|gather|broadcast|all_to_all|accelerat|deepspeed|lightning|fabric|trainer|horovod|hvd"
    r"|drumbeat|pipelin|rpc|isend|irecv|^send$|^recv$|dtensor|distribute_|replicate|average|federat|zero_?r|engine|colossal"
)
_SAY_NOTHING = frozenset(["torch", "torchvision", "torchaudio", "numpy", "datasets", "PIL", "tqdm", "pandas", "timm"])
_STANDARD = frozenset(
    ["os", "sys", "time", "math", "random", "json", "argparse", "pathlib", "typing", "datetime", "logging"]
)


def nothing_averaged(program: Program) -> Iterator[Hit]:
    """Find ranks that make a process group and train, each a model of its own. A module that cannot be read may do more."""
    back = next(_calls(program.tree, "backward"), None)
    begins, steps = next(_calls(program.tree, "init_process_group"), None), next(_calls(program.tree, "step"), None)
    if not (program.complete and back and begins and steps):
        return
    known = _SAY_NOTHING | _STANDARD | getattr(sys, "stdlib_module_names", frozenset())
    for node in ast.walk(program.tree):
        word = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if _MAY_AVERAGE.search(word):
            return
        named = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        named += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        own = [module for module in named if module.split(".")[0] not in known]
        texts = [program.read(module.replace(".", "/") + ".py") if module else "" for module in own]
        if any(not text or _MAY_AVERAGE.search(text) for text in texts):
            return
    yield Hit(program.line(back))


def sampler_missing(program: Program) -> Iterator[Hit]:
    """Find DDP with a loader that gives every rank the same rows."""
    divided = (
        r"IterableDataset|split_dataset_by_node|webdataset|wds\.|accelerator|Fabric|shard\(|\[rank::"
        r"|initialize_model_parallel|init_device_mesh"  # ranks that share a model must be given the same rows
    )
    if not program.complete or not _distributed(program) or re.search(divided, program.text):
        return
    named = {id(node.value): ast.unparse(node.targets[0]) for node in ast.walk(program.tree)
             if isinstance(node, ast.Assign)}  # fmt: skip
    for call in _calls(program.tree, "DataLoader"):
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        words = " ".join([named.get(id(call), ""), *map(ast.unparse, call.args[:1]), given.get("dataset", "")])
        sampler = (
            given.get("sampler", given.get("batch_sampler", "None")) != "None" or len(call.args) > 3 or None in given
        )
        if not sampler and not re.search(r"(?i)val|test|eval", words):
            yield Hit(program.line(call))
            return


def set_epoch_missing(program: Program) -> Iterator[Hit]:
    if not program.complete or ".set_epoch(" in program.text:
        return
    for call in _calls(program.tree, "DistributedSampler"):
        plain = any(
            keyword.arg == "shuffle" and isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            for keyword in call.keywords
        )
        named = ast.unparse(call.args[0]) if call.args else ""
        if not plain and not re.search(r"(?i)val|test|eval", named) and re.search(r"for\s+\w*epoch", program.text):
            yield Hit(program.line(call))
            return


def device_missing(program: Program) -> Iterator[Hit]:
    """Find NCCL with `.cuda()` without a number, and nothing that chooses this rank's GPU."""
    if not program.complete:
        return
    if not re.search(r"init_process_group\([^)\n]*nccl|init_process_group\(\s*\)", program.text):
        return
    if re.search(r"set_device\(|device_id\s*=|cuda\.device\(|CUDA_VISIBLE_DEVICES|deepspeed|accelerat", program.text):
        return
    for node in ast.walk(program.tree):
        if not isinstance(node, ast.Call):
            continue
        last = _name(node.func).rpartition(".")[2]
        bare = last == "cuda" and not node.args and not node.keywords
        to_cuda = last == "to" and node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value == "cuda"
        if (bare or to_cuda) and isinstance(node.func, ast.Attribute):
            yield Hit(program.line(node))
            return


def rank_variable_as_device(program: Program) -> Iterator[Hit]:
    """Find a variable that holds the global rank and selects the GPU. Another rule finds the direct call."""
    globals_: Set[str] = set()
    for node in ast.walk(program.tree):
        if isinstance(node, ast.Assign) and _GLOBAL_RANK.fullmatch(ast.unparse(node.value)):
            # `local_rank = get_rank()` is found where it is made
            globals_ |= {each.id for each in node.targets if isinstance(each, ast.Name) and each.id != "local_rank"}
    if re.search(r"WORLD_SIZE.{0,40}LOCAL_WORLD_SIZE|device_count\(\)\s*==\s*world_size", program.text):
        return
    for node in ast.walk(program.tree):
        if isinstance(node, ast.Call):
            last = _name(node.func).rpartition(".")[2]
            given = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "device_ids")]
            if last in ("set_device", "cuda", "to"):
                chosen = node.args[:1]
            elif last == "device" and len(node.args) == 2:
                chosen = node.args[1:]
            elif last in ("DDP", "DistributedDataParallel"):
                chosen = [item for value in given if isinstance(value, ast.List) for item in value.elts]
            else:
                chosen = []
            for each in chosen:
                name = ast.unparse(each)
                if name in globals_ or (_GLOBAL_RANK.fullmatch(name) and "get_rank" not in name):
                    yield Hit(program.line(node), {"name": name})
                    break
        elif isinstance(node, ast.JoinedStr):
            text = ast.unparse(node)
            found = re.match(r"f['\"]cuda:\{(\w+)\}['\"]$", text)
            if found and found.group(1) in globals_:
                yield Hit(program.line(node), {"name": found.group(1)})


def save_everywhere(program: Program) -> Iterator[Hit]:
    """Find torch.save of a distributed script to one path without a check of the rank."""
    if not program.complete or not _distributed(program):
        return
    parents: Dict[ast.AST, ast.AST] = {
        child: node for node in ast.walk(program.tree) for child in ast.iter_child_nodes(node)
    }
    saves = [call for call in _calls(program.tree, "save") if _name(call.func) == "torch.save" and len(call.args) > 1]
    ranks = _made_of_rank(program.tree) if saves else set()
    for call in saves:
        if not _asks(call.args[1], ranks) and not _guarded(call, parents, program, ranks):
            yield Hit(program.line(call))


def _made_of_rank(tree: ast.AST) -> Set[str]:
    """Return the names of variables, attributes and functions whose value is a rank or follows from one."""
    bound: List[Tuple[ast.AST, ast.AST]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            bound += [pair for target in node.targets for pair in _unpacked(target, node.value)]
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value:
            bound.append((node.target, node.value))
        elif isinstance(node, ast.FunctionDef):
            returns = (each.value for each in ast.walk(node) if isinstance(each, ast.Return))
            bound += [(node, value) for value in returns if value and not isinstance(value, ast.Tuple)]
    ranks: Set[str] = set()
    for _ in range(_DEEPEST):  # one is made of another
        bound = [pair for pair in bound if _last_name(pair[0]) not in ranks]
        ranks |= {_last_name(target) for target, value in bound if _follows(value, ranks)} - {""}
    return ranks


def _unpacked(target: ast.AST, value: ast.AST) -> List[Tuple[ast.AST, ast.AST]]:
    """Return each target with its value; all of them with the whole value if that is made elsewhere."""
    if not isinstance(target, (ast.Tuple, ast.List)):
        return [(target, value)]
    several = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
    values = value.elts if several and isinstance(value, (ast.Tuple, ast.List)) else [value] * len(target.elts)
    return [pair for each, its in zip(target.elts, values) for pair in _unpacked(each, its)]


def _last_name(node: ast.AST) -> str:
    """Return `b` of `a.b` and of a function b; empty for what has no name."""
    return next((str(value) for key in ("id", "attr", "name") if (value := getattr(node, key, None))), "")


def _follows(value: ast.AST, ranks: Set[str]) -> bool:
    """Return true if the value is a rank or computed from one. What a function makes of a rank that it is given (a device, a
    loss) is not; what it makes of a rank's name (`getenv("RANK")`), and what a conversion makes, is."""
    left = [value]
    while left:
        node = left.pop()
        name = _last_name(node)
        if name in ranks or _of_one_rank(name):
            return True
        if isinstance(node, ast.Call):
            if any(map(_names_rank, node.args)):
                return True
            converts = isinstance(getattr(builtins, _name(node.func), None), type)
            left += [node.func, *(node.args if converts else ())]
        elif isinstance(node, ast.Subscript):
            if _names_rank(node.slice):
                return True
            left.append(node.value)
        elif isinstance(node, _COMPUTES):
            left += ast.iter_child_nodes(node)
    return False


def _names_rank(node: ast.AST) -> bool:
    text = node.value if isinstance(node, ast.Constant) else None
    return isinstance(text, str) and text.isidentifier() and _of_one_rank(text)


def _of_one_rank(name: str) -> bool:
    """Return false for `num_ranks` and `mean_over_ranks` too: these are the same everywhere."""
    return bool(_RANK.search(name)) and "ranks" not in name.lower()


def _asks(node: ast.AST, ranks: Set[str]) -> bool:
    return bool(_RANK.search(ast.unparse(node))) or any(_last_name(each) in ranks for each in ast.walk(node))


def _guarded(node: ast.AST, parents: Dict[ast.AST, ast.AST], program: Program, ranks: Set[str], depth: int = 0) -> bool:
    """Return true if the rank is checked around it, before it on its way, or where its function is called."""
    child: ast.AST = node
    while child in parents:
        parent = parents[child]
        tests = parent.values[:1] if isinstance(parent, ast.BoolOp) else [getattr(parent, "test", child)]
        if any(each is not child and _asks(each, ranks) for each in tests):
            return True
        block = next((each for _, each in ast.iter_fields(parent) if isinstance(each, list) and child in each), [child])
        if any(_sends_away(each, ranks) for each in block[: block.index(child)]):
            return True
        if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if any(_asks(each, ranks) for each in parent.decorator_list):
                return True
            own = set(ast.walk(parent))
            calls = [call for call in _calls(program.tree, parent.name) if call not in own]
            if depth == _DEEPEST or not calls:
                return False
            return all(_guarded(call, parents, program, ranks, depth + 1) for call in calls)
        child = parent
    return False


def _sends_away(statement: ast.AST, ranks: Set[str], in_loop: bool = False) -> bool:
    """Return true if some ranks do not reach what follows the statement."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return False
    inner = [each for each in ast.iter_child_nodes(statement) if isinstance(each, (ast.stmt, ast.ExceptHandler))]
    if isinstance(statement, ast.If) and _asks(statement.test, ranks):
        return any(_leaves(each, in_loop) for each in inner)
    in_loop = in_loop or isinstance(statement, (ast.For, ast.AsyncFor, ast.While))
    return any(_sends_away(each, ranks, in_loop) for each in inner)


def _leaves(statement: ast.AST, in_loop: bool) -> bool:
    """Return true for a way out of the block. `in_loop`: and of the loop that the block has around it."""
    called = (
        _name(statement.value.func) if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) else ""
    )
    kinds = (ast.Return, ast.Raise) if in_loop else (ast.Return, ast.Raise, ast.Continue, ast.Break)
    return isinstance(statement, kinds) or called.rpartition(".")[2] in ("exit", "_exit", "quit")


def optimizer_in_loop(program: Program) -> Iterator[Hit]:
    """Find an optimizer made anew in each step: momentum and moments are lost. A loop that makes its model too is a sweep."""
    for loop in ast.walk(program.tree):
        if not isinstance(loop, (ast.For, ast.While)) or not list(_calls(loop, "backward")):
            continue
        made = {target.id for node in ast.walk(loop) if isinstance(node, ast.Assign) for target in node.targets
                if isinstance(target, ast.Name)}  # fmt: skip
        for node in loop.body:
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
                continue
            called = _name(node.value.func)
            if not re.search(r"(?:^|\.)optim\.\w+$|^(?:Adam|AdamW|SGD|RMSprop|Adagrad|LBFGS)$", called):
                continue
            owners = {_name(call.func).split(".")[0] for call in _calls(node.value, "parameters")}
            if not owners & made and "lr_scheduler" not in called:
                yield Hit(program.line(node), {"name": ast.unparse(node.targets[0])})


def zero_grad_missing(program: Program) -> Iterator[Hit]:
    """Find backward and step in one loop without zero_grad: gradients add up for ever."""
    text = program.text
    if re.search(r"zero_grad|\.grad\s*=\s*None|set_to_none|deepspeed|model_engine|LightningModule|Trainer\(", text):
        return
    for loop in ast.walk(program.tree):
        if not isinstance(loop, (ast.For, ast.While)):
            continue
        back, steps = [call for call in _calls(loop, "backward") if not call.args], [
            call for call in _calls(loop, "step") if re.search(r"(?i)opt|scaler", _name(call.func).rpartition(".")[0])
        ]  # fmt: skip
        if back and steps:
            yield Hit(program.line(back[0]))
            return


def hooks_twice(program: Program) -> Iterator[Hit]:
    """Find a second communication hook on one DDP."""
    hooked: Set[str] = set()
    nodes = (node for node in ast.walk(program.tree) if isinstance(node, (ast.Assign, ast.Call)))
    for node in sorted(nodes, key=lambda node: node.lineno):
        if isinstance(node, ast.Assign):
            made = isinstance(node.value, ast.Call) and _name(node.value.func).rpartition(".")[2]
            hooked -= (
                {_name(target) for target in node.targets} if made in ("DDP", "DistributedDataParallel") else set()
            )
        elif _name(node.func).endswith(".register_comm_hook"):
            name = _name(node.func).rpartition(".")[0]
            if name in hooked:
                yield Hit(program.line(node), {"name": name})
            hooked.add(name)


_ACCUMULATES = regex(r"(?i)grad\w*_accum|accum\w*_(?:grad|step|iter|every|batch|freq)|accumulation")


def accumulation(program: Program) -> Iterator[Hit]:
    """Find gradients that are gathered over several backward passes, every one of which is reduced over the network."""
    code = ast.unparse(program.tree) if _ACCUMULATES.search(program.text) else ""
    if not _ACCUMULATES.search(code) or re.search(r"no_sync|set_requires_gradient_sync|require_backward", code):
        return
    blocks = (each for node in ast.walk(program.tree) for _, each in ast.iter_fields(node) if isinstance(each, list))
    passes = [
        program.line(statement)
        for block in blocks
        for place, statement in enumerate(block)
        if _calls_method(statement, "backward") and not any(_calls_method(each, "step") for each in block[place + 1 :])
    ]
    yield from map(Hit, sorted(passes)[:1])


def _calls_method(node: ast.AST, name: str) -> bool:
    """Return true for a statement that is nothing but a call of this method."""
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and _name(call.func).endswith(f".{name}")


def name_undefined(program: Program) -> Iterator[Hit]:
    """Find names that nothing in the whole file ever binds; one finding for all of them."""
    if not program.complete or re.search(r"import \*|\bexec\(|globals\(\)\[|\beval\(", program.text):
        return
    bound = set(dir(builtins)) | _KNOWN_ELSEWHERE
    used: List[Tuple[int, str]] = []
    for node in ast.walk(program.tree):
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                used.append((program.line(node), node.id))
            else:
                bound.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            bound |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            bound |= set(node.names)
        elif type(node).__name__ in ("MatchAs", "MatchStar", "MatchMapping"):  # Python 3.9 has no such nodes
            bound |= {str(value) for key in ("name", "rest") if (value := getattr(node, key, None))}
    missing = sorted((line, name) for line, name in used if name not in bound)
    names = list(dict.fromkeys(name for _, name in missing))
    if names:
        yield Hit(missing[0][0], {"name": some(names, 4), "are": "is" if len(names) == 1 else "are"})


CHECKS = by_name(
    one_process, nothing_averaged, sampler_missing, set_epoch_missing, device_missing, rank_variable_as_device,
    save_everywhere, optimizer_in_loop, zero_grad_missing, name_undefined, hooks_twice, accumulation,
)  # fmt: skip
