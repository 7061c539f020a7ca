"""JSON schemas of what `--json` prints, derived from the records themselves. `drumbeat COMMAND --json-schema` prints one.

A shape is a type, the place of one (`module:Name`), a list with the shape of its items, or a mapping of keys to shapes; a key
that ends in `?` may be missing, and `**` names a record whose fields are there too. A tuple holds alternatives.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import importlib
import inspect
from typing import Any, Dict, List, Mapping, Tuple, Union, get_args, get_origin, get_type_hints

from drumbeat.base.regex import regex

VERSION = "1.3"  # a new key raises the second number, a key that goes or changes its meaning the first

_FINDING = "drumbeat.findings.model:Finding"
_STATE = {
    "**": "drumbeat.desk.state:State",
    "outcome": Union[str, None],
    "throughput": ({"value": float, "unit": str}, None),
}
_SUBMITTED = {"handle": str, "job": str, "run_id?": str, "folder": str}
_NOTE = {"line": int, "text": str, "why": str}
_PREDICTION = {
    **dict.fromkeys(("model", "framework", "gpu", "precision", "flop_convention", "verdict", "fix"), str),
    **dict.fromkeys(("basis", "basis_words", "not_modelled"), str),
    **dict.fromkeys(("gpus", "gpus_per_node"), int),
    **dict.fromkeys(("batch", "seq", "step_s", "mfu", "memory_gib", "memory_of_gib"), float),
    **{f"{unit}_per_s?": float for unit in ("tokens", "samples", "images")},
    **{f"{unit}_per_s_90?": [float] for unit in ("tokens", "samples", "images")},
    "step_s_90": [float],
    "layout": Dict[str, Any],
    "arguments": Union[str, None],
    "terms_s": Dict[str, float],
    "stages_gib": [Dict[str, float]],
    "naive_step_s": Union[float, None],
    "sources": [str],
    "whole_run": Union[Dict[str, Any], None],
    "use?": bool,
}
_PLAN = {
    "order": "drumbeat.base.order:Order",
    "nodes": ["drumbeat.plan.show:NodePlan"],
    "decided here?": ["drumbeat.base.order:EnvVar"],
    "set at the start?": Dict[str, str],
    "differences?": [{"node": int, "host": str, "changes": ["drumbeat.plan.show:Difference"]}],
    "paths?": Dict[str, str],
    "path findings?": [_FINDING],
    "findings?": [_FINDING],
    "predicted?": Union[str, None],
}
_AGAINST = {"from nodes": int, "to nodes": int, "changes": ["drumbeat.plan.show:Difference"]}
_TUNED = {
    **dict.fromkeys(("schema", "kind", "name", "folder", "ended", "why"), str),
    **dict.fromkeys(("nodes", "ranks"), int),
    **dict.fromkeys(("data_ranks", "global_batch"), Union[int, None]),
    "cost": Dict[str, Any],
    "trials": ["drumbeat.tune.search:Result"],
    **dict.fromkeys(("refused", "words"), Any),
    **dict.fromkeys(("largest", "fastest", "recommended", "changes"), Any),
}
_NODE = {"**": "drumbeat.desk.nodes:RememberedNode", "counts": Dict[str, int]}

SHAPES: Dict[str, Any] = {
    "compare": {"**": "drumbeat.report.scaling:Comparison", "fair": Union[bool, None]},
    "convert": {
        "job": str,
        "left_out": [_NOTE],
        "to_check": [_NOTE],
        "to_export": [_NOTE],
        "advice": [_NOTE],
        "differences": [dict.fromkeys(("what", "script", "job", "why"), str)],
        "read": Dict[str, List[int]],
        "defaults": Dict[str, str],
    },
    "diagnose": ("drumbeat.logs.report:Report", [Dict[str, Any]]),  # the second: --rules
    "doctor": [{"of": str, "findings": [_FINDING]}],
    "facts": "drumbeat.machine.model:Facts",
    "lint": {
        "files": [
            {"file": str, "looked_at": Union[str, None], "findings": [{"**": _FINDING, "source": str}], "fixed": [str]}
        ]
    },
    "list": [_STATE],
    "logs": "drumbeat.runfolder.records:Line",  # of each line
    "nodes": (
        {"site": str, "runs": int, "nodes": [_NODE]},
        {"hosts": [str], "excluded_until": Union[float, None]},  # exclude, forget
    ),
    "plan": (_PLAN, _AGAINST, "drumbeat.backends.contract:Request"),
    "predict": [_PREDICTION],
    "report": "drumbeat.report.figures:Figures",
    "site": (
        [{"name": str, "summary": str, "file": Union[str, None], "here": bool}],  # list
        {"site": str, "paths": Dict[str, Union[str, None]]},  # check
        {"dockerfile": str},  # image
        Dict[str, Any],  # show: the keys of a profile, docs/site.md
    ),
    "status": _STATE,
    "submit": _SUBMITTED,
    "train": Dict[str, Any],  # the recipe's own figures
    "tune": (_TUNED, _SUBMITTED),
    "verify": {
        **dict.fromkeys(("schema?", "folder", "note?"), str),
        "exit_code": int,
        "verdicts?": ["drumbeat.findings.model:Verdict"],
        "rows?": ["drumbeat.verify.judge:CollectiveRow"],
        "results": Union[Dict[str, Any], None],
        "failure?": (_FINDING, None),
    },
    "watch": "drumbeat.watch.model:Head",
}

_PLAIN = {str: "string", int: "integer", bool: "boolean", type(None): "null"}
_COMMENT = regex(r"^    (\w+): [^#]+#\s*(.+)$")


def schema_of(command: str) -> Dict[str, Any]:
    """Return the schema of what `drumbeat COMMAND --json` prints; `logs` prints one such value per line."""
    records: Dict[str, Any] = {}
    shape = _Shapes(records).schema(SHAPES[command])
    about = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"drumbeat:{command}:{_version(SHAPES[command])}",
        "title": f"drumbeat {command} --json",
    }
    return {**about, **shape, **({"$defs": records} if records else {})}


def _version(shape: Any) -> str:
    """Return the version that the printed record itself names in `schema`, else that of these shapes."""
    shape = shape[0] if isinstance(shape, tuple) else shape
    place = shape.get("**") if isinstance(shape, dict) else shape
    if not isinstance(place, str):
        return VERSION
    module, _, name = place.partition(":")
    return str(getattr(getattr(importlib.import_module(module), name), "schema", VERSION))


class _Shapes:
    """Turns shapes into schemas; each record is described once, in `records`."""

    def __init__(self, records: Dict[str, Any]) -> None:
        self.records = records

    def schema(self, shape: Any) -> Dict[str, Any]:
        if isinstance(shape, str):
            module, _, name = shape.partition(":")
            return self.schema(getattr(importlib.import_module(module), name))
        if isinstance(shape, list):
            return {"type": "array", "items": self.schema(shape[0])}
        if isinstance(shape, tuple):
            return {"anyOf": [self.schema(each) for each in shape]}
        if isinstance(shape, Mapping):
            return self._object(shape)
        return self._type(shape)

    def _object(self, shape: Mapping[str, Any]) -> Dict[str, Any]:
        fields = {name: each for name, each in shape.items() if name != "**"}
        made = _described({name.rstrip("?"): self.schema(each) for name, each in fields.items()})
        made["required"] = [name for name in fields if not name.endswith("?")]
        if "**" in shape:
            base = self.records[self.schema(shape["**"])["$ref"].rpartition("/")[2]]
            made["properties"] = {**base["properties"], **made["properties"]}
            made["required"] = [*base["required"], *made["required"]]
        return made

    def _type(self, hint: Any) -> Dict[str, Any]:
        origin, args = get_origin(hint), get_args(hint)
        if hint is Any or hint is object:
            return {}
        if hint is None or hint in _PLAIN:
            return {"type": _PLAIN[type(None) if hint is None else hint]}
        if hint is float:
            return {"type": ["number", "null"]}  # null: not a finite number
        if dataclasses.is_dataclass(hint):
            return self._record(hint)
        if hasattr(hint, "_fields"):  # a named tuple is a list
            origin, args = tuple, tuple(get_type_hints(hint).values())
        if origin is Union:
            return self._either([self._type(arg) for arg in args])
        if origin is tuple and args[1:] != (Ellipsis,):
            items = [self._type(arg) for arg in args]
            return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
        if origin is not None and issubclass(origin, collections.abc.Mapping):
            return {"type": "object", "additionalProperties": self._type(args[1])}
        if origin is not None and issubclass(origin, collections.abc.Collection):
            return {"type": "array", "items": self._type(args[0])}
        raise TypeError(f"{hint} has no schema")

    @staticmethod
    def _either(schemas: List[Dict[str, Any]]) -> Dict[str, Any]:
        if all(set(each) == {"type"} for each in schemas):
            names = [
                name for each in schemas for name in ([each["type"]] if isinstance(each["type"], str) else each["type"])
            ]
            return {"type": list(dict.fromkeys(names))}
        return {"anyOf": schemas}

    def _record(self, record: Any) -> Dict[str, Any]:
        name = f"{record.__module__.rpartition('.')[2]}.{record.__name__}"
        if name not in self.records:
            self.records[name] = {}  # it may hold itself
            hints, words = get_type_hints(record), _comments(record)
            fields = {field.name: self._type(hints[field.name]) for field in dataclasses.fields(record)}
            told = {key: {**each, "description": words[key]} if key in words else each for key, each in fields.items()}
            self.records[name] = {**_described(told), "required": list(fields)}
        return {"$ref": f"#/$defs/{name}"}


def _described(properties: Dict[str, Any]) -> Dict[str, Any]:
    return {"type": "object", "properties": properties}


def _comments(record: Any) -> Dict[str, str]:
    """Return the source's comments beside each field; nothing if the source is not available."""
    try:
        lines = inspect.getsource(record).splitlines()
    except (OSError, TypeError):
        return {}
    found: List[Tuple[str, str]] = [(match[1], match[2]) for match in map(_COMMENT.match, lines) if match]
    return dict(found)
