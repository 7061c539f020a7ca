"""A value means what its name says: no rank's number as a pid, no rule that acts by its name, nothing completed from outside."""

import ast

import pytest

from tests.contracts.source import SRC, of_each_file

VISIBLE = {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"}
# Where the variables that choose GPUs may stand side by side: the one list of them; what `convert` leaves out of a script; the
# pairs of them of which `lint` warns.
LISTS = {"machine/vendors/amd.py", "convert/launch.py", "lint/checks_launch.py"}
COMPLETE = {"share", "mark", "pipeline", "before"}  # of a training step and of checkpoints: given when they are made


def name_of(node):
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def negative_numbers(nodes):
    """Minus a rank's or a task's number: once used where a pid was expected. Minus a pid is a process group."""
    operands = [each.operand for each in nodes if isinstance(each, ast.UnaryOp) and isinstance(each.op, ast.USub)]
    return [name_of(each) for each in operands if name_of(each).endswith(("local_id", "rank", "local_rank"))]


def rules_by_name(nodes):
    """What a rule is for, read from how its id begins."""
    return [
        ast.unparse(each)
        for each in nodes
        if isinstance(each, ast.Call)
        and name_of(each.func) == "startswith"
        and name_of(each.func.value) == "id"
        and isinstance(each.func.value, ast.Attribute)
    ]


def lists_of_visible_devices(nodes):
    literals = [each for each in nodes if isinstance(each, (ast.Tuple, ast.List, ast.Set))]
    values = [{item.value for item in each.elts if isinstance(item, ast.Constant)} for each in literals]
    return [sorted(found & VISIBLE) for found in values if len(found & VISIBLE) > 1]


def completed_from_outside(nodes):
    """`step.pipeline = ...`: set on something that somebody else has made."""
    targets = [target for each in nodes if isinstance(each, ast.Assign) for target in each.targets]
    attributes = [each for each in targets if isinstance(each, ast.Attribute) and each.attr in COMPLETE]
    return [ast.unparse(each) for each in attributes if name_of(each.value) != "self"]


def wrongly_named_optimizers(nodes):
    functions = [each for each in nodes if isinstance(each, ast.FunctionDef) and "adam" in each.name.lower()]
    used = {each.name: {name_of(node) for node in ast.walk(each)} for each in functions}
    assigned = [each for each in nodes if isinstance(each, ast.Assign)]
    used.update(
        (name_of(target), {name_of(node) for node in ast.walk(each.value)})
        for each in assigned
        for target in each.targets
        if "adam" in name_of(target).lower()
    )
    return [name for name, names in used.items() if "SGD" in names]


CHECKS = {
    negative_numbers: "step(-local_id)",
    rules_by_name: "rule.id.startswith('A')",
    lists_of_visible_devices: "NAMES = ('CUDA_VISIBLE_DEVICES', 'HIP_VISIBLE_DEVICES')",
    completed_from_outside: "step.pipeline = pipeline",
    wrongly_named_optimizers: "adam = torch.optim.SGD(parameters)",
}


@of_each_file
def hits(path, nodes):
    return {check: check(nodes) for check in CHECKS}


@pytest.mark.parametrize("check,example", CHECKS.items(), ids=[each.__name__ for each in CHECKS])
def test_a_value_means_what_its_name_says(check, example):
    found = {str(path.relative_to(SRC)): in_file[check] for path, in_file in hits().items() if in_file[check]}
    assert check(list(ast.walk(ast.parse(example)))), "the check finds its own example"
    if check is lists_of_visible_devices:
        assert set(found) == LISTS, found
    else:
        assert not found
